"""Names of tensors and index files: the decoder's tensors are found, and the error names all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import ModelFiles, read_model

from .test_model_files import CONFIG, folder, safetensors

EMBED, UP, NORM, HEAD = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"


def read(path: Path, *names: str, **config: Any) -> ModelFiles:
    return read_model(folder(path / "tiny", {**CONFIG, **config}, model__safetensors=safetensors(*names)))


@pytest.mark.parametrize(
    "stored",
    [
        [EMBED, UP, NORM, HEAD],
        ["embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight", HEAD],
        ["model.model.embed_tokens.weight", "model.model.layers.0.mlp.up_proj.weight", "model.model.norm.weight", HEAD],
        [f"model.{name}" for name in (EMBED, UP, NORM, HEAD)],
        [EMBED, "layers.0.mlp.up_proj.weight", "model.model.norm.weight", "model.lm_head.weight"],
    ],
)
def test_one_prefix_too_many_or_too_few(stored: list[str], tmp_path: Path) -> None:
    files = read(tmp_path, *stored)
    assert set(files.tensors) == {EMBED, UP, NORM, HEAD}
    assert not files.warnings


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"'model\.norm\.weight' and 'model\.model\.norm\.weight' are the same"):
        read(tmp_path, NORM, "model.model.norm.weight")
    with pytest.raises(ModelRefused, match="are the same tensor"):
        read(tmp_path, "norm.weight", "model.model.norm.weight")


UNUSED = [
    "v_head.summary.weight",
    "score.weight",
    "foo.bar",
    "vision_tower.x.weight",
    "model.vision_tower.x.weight",
    "model.multi_modal_projector.norm.weight",
    "mtp.layers.0.mlp.up_proj.weight",
    "lm_head.bias",
    "model.position_ids",
    "model.layers.0.self_attn.masked_bias",
    "model.layers.0.self_attn.bias",
    "model.layers.0.self_attn.k_proj.k_scale",
    "model.layers.2.mlp.up_proj.weight",
]


@pytest.mark.parametrize("name", UNUSED)
def test_a_tensor_that_the_decoder_does_not_have_is_named(name: str, tmp_path: Path) -> None:
    files = read(tmp_path, NORM, name)
    [warning] = files.warnings
    assert set(files.tensors) == {NORM}
    assert f"tensor {name!r}: not used" in warning


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.embed_positions.weight",
    ],
)
def test_a_tensor_that_could_change_the_logits_stays(name: str, tmp_path: Path) -> None:
    """The loader refuses it by name."""
    files = read(tmp_path, NORM, name)
    assert name in files.tensors
    assert not files.warnings


def test_computed_buffers_and_layers_that_predict_need_no_warning(tmp_path: Path) -> None:
    files = read(tmp_path, NORM, ROTARY, "model.rotary_emb.inv_freq")
    assert (set(files.tensors), files.warnings) == ({NORM}, ())
    files = read(tmp_path, NORM, "model.layers.2.mlp.up_proj.weight", model_type="glm4_moe")
    assert (set(files.tensors), files.warnings) == ({NORM}, ())


def test_a_head_without_an_embedding_is_the_embedding_of_a_tied_model(tmp_path: Path) -> None:
    assert set(read(tmp_path, HEAD, tie_word_embeddings=True).tensors) == {EMBED}
    assert set(read(tmp_path, HEAD).tensors) == {HEAD}


def sharded(path: Path, weight_map: dict[str, str], first: tuple[str, ...], second: tuple[str, ...]) -> ModelFiles:
    made = folder(path / "tiny", CONFIG, model__safetensors__index__json=json.dumps({"weight_map": weight_map}))
    (made / FIRST).write_bytes(safetensors(*first))
    (made / SECOND).write_bytes(safetensors(*second))
    return read_model(made)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({ROTARY: FIRST}, f"lists tensor {ROTARY!r}, which no file has"),
        ({"foo": FIRST, "score.weight": SECOND}, "lists tensor 'foo' and 1 more, which no file has"),
        ({"model.layers.0.self_attn.q_proj.bias": FIRST}, "q_proj.bias', which no file has"),
        ({NORM: None}, f"does not list tensor {NORM!r}"),
        ({NORM: FIRST}, f"names another file of tensor {NORM!r}"),
    ],
)
def test_an_index_that_differs_from_its_shards(changes: dict[str, str | None], said: str, tmp_path: Path) -> None:
    """The names in the shards count, as in transformers."""
    listed = {EMBED: FIRST, UP: SECOND, NORM: SECOND} | changes
    files = sharded(tmp_path, {name: file for name, file in listed.items() if file}, (EMBED,), (UP, NORM))
    [warning] = files.warnings
    assert {name: tensor.file.name for name, tensor in files.tensors.items()} == {
        EMBED: FIRST,
        UP: SECOND,
        NORM: SECOND,
    }
    assert warning.startswith("model.safetensors.index.json ")
    assert said in warning


def test_the_last_of_two_tensors_counts(tmp_path: Path) -> None:
    files = sharded(tmp_path, {EMBED: FIRST, NORM: SECOND}, (EMBED, NORM), (UP, NORM))
    assert files.tensors[NORM].file.name == SECOND
    assert files.warnings[0] == f"tensor {NORM!r}: read from {SECOND}, the last of the files that have it"


@pytest.mark.parametrize("weights", ["consolidated.safetensors", "consolidated.00.safetensors"])
def test_the_format_of_mistrals_own_programs_is_named(weights: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "tiny", CONFIG, params__json="{}")
    (path / weights).write_bytes(safetensors("norm.weight"))
    with pytest.raises(ModelRefused, match="Mistral's own format"):
        read_model(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelRefused, match="Mistral's own format"):
        read_model(path)


def test_weights_in_both_formats(tmp_path: Path) -> None:
    path = folder(tmp_path / "tiny", CONFIG, params__json="{}", model__safetensors=safetensors(NORM))
    (path / "consolidated.safetensors").write_bytes(safetensors("norm.weight"))
    assert set(read_model(path).tensors) == {NORM}
