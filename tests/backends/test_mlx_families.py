"""Teacher-forced log-probabilities of MLX against transformers: every family, both spellings of config.json, chunks,
decode steps and prefix hits. A small error of a window, a rope or a head changes log-probabilities, but often not the
likeliest token of a random model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA float32 products of more than one row keep 10 bits otherwise

from mlx_lm.models import llama
from mlx_lm.utils import load_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from localllm.backends import mlx
from localllm.backends.mlx import families
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions

from .batches import Row, make_batch
from .checkpoints import GPT_OSS, save_mxfp4
from .shapes import PARAMETERS
from .tiny import HIDDEN, HYBRIDS, TINIES, VOCAB, Tiny, old_spelling

pytestmark = pytest.mark.real_otherdevice

PAGE = 8
OF = {tiny.label: tiny for tiny in TINIES}
BOUND = 1e-4
# Models that mlx-lm's classes cannot compute -> the reason in the error.
REFUSED = {
    "deepseek_v2": "parameters not in model",  # biases of the MLP
    "deepseek_v3-dense": "rope_interleave is False",
    "gemma2": "differently from transformers",
    "gemma2-uncapped": "differently from transformers",
    "glm4-whole-heads": "Missing 1 parameters",  # the class has no tied head
    "glm4-yarn": "the rope type is yarn",
    "gpt_oss": "parameters not in model",  # experts in floats; OpenAI publishes MXFP4
    "gpt_oss-panels": "parameters not in model",
    "gpt_oss-yarn": "parameters not in model",
    "qwen2_moe-window": "parameters not in model",  # dense layers
    "qwen3_moe-window": "use_sliding_window is True",
    **{tiny.label: "store other states than keys and values" for tiny in TINIES if tiny.label.startswith(HYBRIDS)},
    "bamba": "bamba is not among the architectures",
}


class Forced:
    """A tiny model on the MLX runner and in transformers."""

    def __init__(self, tiny: Tiny, folder: Path) -> None:
        self.model = tiny.save(folder)
        budget = LoadOptions(context=tiny.context, cache_bytes=2**25, max_rows=8, page_size=PAGE, dtype="float32")
        self.runner = mlx.open(read_model(folder), replace(budget, max_step_tokens=512))
        self._pages = 1

    def pages(self, tokens: int) -> list[int]:
        """Pages that no other row has."""
        first, self._pages = self._pages, self._pages + -(-tokens // PAGE)
        return [*range(first, self._pages)]

    def expected(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Log-probabilities after each token [tokens, vocab]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()

    def step(self, *rows: Row) -> NDArray[np.float32]:
        """Log-probabilities after the last token of each row [rows, vocab]."""
        batch = make_batch(rows, VOCAB)
        sampling = replace(batch.sampling, logprobs=np.full(len(rows), VOCAB, np.int32))
        result = self.runner.run(replace(batch, sampling=sampling)).result()
        assert result.top_tokens is not None
        assert result.top_logprobs is not None
        actual = np.full((len(rows), VOCAB), np.nan, np.float32)
        np.put_along_axis(actual, result.top_tokens.astype(np.int64), result.top_logprobs, 1)
        return actual


def near(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=BOUND)


def texts(tiny: Tiny) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCAB, (2, tiny.length), generator=generator).tolist()  # type: ignore[no-any-return]


def agrees(tiny: Tiny, folder: Path) -> None:
    """Compare prompts of several lengths in one step, a prompt in chunks that then decodes, and a prompt with cached
    pages that decodes beside the first."""
    forced, (text, other) = Forced(tiny, folder), texts(tiny)
    assert mlx.accepts(read_model(folder)) == ""
    length, expected = len(text), forced.expected(text)
    lengths = sorted({1, 2, length // 3, length // 2, length - 1, length})
    near(
        forced.step(*(Row(text[:end], 0, forced.pages(end)) for end in lengths)), expected[[end - 1 for end in lengths]]
    )
    pages = forced.pages(length)
    for start, end in pairwise([*range(0, length - 5, 11), *range(length - 5, length + 1)]):
        near(forced.step(Row(text[start:end], start, pages)), expected[end - 1 : end])
    cached = length // 2 // PAGE * PAGE
    again = [*text[:cached], *other[cached:]]
    expected_again, shared = forced.expected(again), [*pages[: cached // PAGE], *forced.pages(length - cached)]
    near(forced.step(Row(again[cached:-4], cached, shared)), expected_again[-5:-4])
    other_pages = forced.pages(length)
    forced.step(Row(text[:-4], 0, other_pages))
    for index in range(length - 4, length):
        actual = forced.step(
            Row(text[index : index + 1], index, other_pages), Row(again[index : index + 1], index, shared)
        )
        near(actual, np.stack([expected[index], expected_again[index]]))


@pytest.mark.parametrize("tiny", [*(tiny for tiny in TINIES if tiny.label not in REFUSED), *PARAMETERS], ids=str)
def test_shapes_equal_transformers(tiny: Tiny, tmp_path: Path) -> None:
    agrees(tiny, tmp_path)


class PublishedGptOss(Tiny):
    """gpt_oss as OpenAI publishes it, with experts in MXFP4."""

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        save_mxfp4(folder, folder / "meant")
        return AutoModelForCausalLM.from_pretrained(folder / "meant", dtype=dtype).eval()


def test_gpt_oss_with_experts_in_mxfp4_equals_transformers(tmp_path: Path) -> None:
    agrees(PublishedGptOss(GPT_OSS.label, GPT_OSS.model_type), tmp_path)


@pytest.mark.parametrize("tiny", PARAMETERS, ids=str)
def test_shapes_in_the_spelling_of_transformers_4_equal_transformers(tiny: Tiny, tmp_path: Path) -> None:
    agrees(replace(tiny, rewrite=old_spelling), tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2", "phi3"])
def test_head_size_that_does_not_divide_the_hidden_size(tmp_path: Path, model_type: str) -> None:
    """mlx-lm's classes compute the size of a head from the hidden size."""
    agrees(Tiny(model_type, model_type, {"head_dim": 20}), tmp_path)


def test_longrope_has_the_factors_of_the_context_in_the_cache(tmp_path: Path) -> None:
    """The model allows 128 tokens and the cache 64, so the short factors apply."""
    tiny = replace(OF["phi3-longrope-long"], length=45)
    forced, text = Forced(tiny, tmp_path), texts(tiny)[0]
    wide = LoadOptions(cache_bytes=2**22, page_size=PAGE, dtype="float32")
    token_bytes = mlx.open(read_model(tmp_path), wide).spec.cache_bytes // 2
    pages = mlx.open(read_model(tmp_path), wide).spec.groups[0].num_pages
    forced.runner = mlx.open(read_model(tmp_path), replace(wide, cache_bytes=2 * 8 * (token_bytes // pages)))
    assert forced.runner.spec.max_context == 64
    near(forced.step(Row(text, 0, [*range(1, 7)])), forced.expected(text)[-1:])


def test_rope_tables_in_the_files_are_ignored(tmp_path: Path) -> None:
    forced, text = Forced(OF["phi3"], tmp_path), [5, 9, 77, 30]
    weights = load_file(tmp_path / "model.safetensors")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    save_file(weights | table, tmp_path / "model.safetensors")
    forced.runner = mlx.open(read_model(tmp_path), LoadOptions(dtype="float32", cache_bytes=2**22))
    near(forced.step(Row(text, 0, forced.pages(4))), forced.expected(text)[-1:])


@pytest.mark.parametrize("name", ["scale", "rope", "n_heads"])
def test_class_without_an_attribute_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Another release of mlx-lm may store a value under another name."""
    create = llama.Attention.__init__

    def create_without(attention: Any, *args: Any) -> None:
        create(attention, *args)
        delattr(attention, name)

    monkeypatch.setattr(llama.Attention, "__init__", create_without)
    OF["llama-llama3"].save(tmp_path)
    with pytest.raises(ModelRefused, match=f"{name} of Attention is absent"):
        mlx.open(read_model(tmp_path), LoadOptions(dtype="float32"))


def _change_eps(model: Any) -> None:
    model.model.norm.eps = 1e-3


def _remove_layer(model: Any) -> None:
    model.model.layers = model.layers[:2]


def _tie_head(model: Any) -> None:
    model.args.tie_word_embeddings = True


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_change_eps, "rms_norm_eps of model.norm"),
        (_remove_layer, "num_hidden_layers is 2"),
        (_tie_head, "tie_word_embeddings is True"),
    ],
)
def test_model_that_differs_from_its_config_is_refused(
    tmp_path: Path, change: Callable[[Any], None], name: str
) -> None:
    OF["llama-llama3"].save(tmp_path)
    config = read_model(tmp_path).config
    arguments, classes = families.arguments(config), families.classes(config, 128)
    [model, _] = load_model(tmp_path, lazy=True, model_config=arguments, get_model_classes=classes)
    families.verify(model, config)
    change(model)
    with pytest.raises(ModelRefused, match=name):
        families.verify(model, config)


def test_another_head_beside_tied_embeddings_is_used(tmp_path: Path) -> None:
    forced, text = Forced(OF["llama-tied"], tmp_path), [5, 9, 77, 30]
    change_weights(tmp_path, "lm_head.weight", torch.eye(VOCAB, HIDDEN))
    forced.model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    forced.runner = mlx.open(read_model(tmp_path), LoadOptions(dtype="float32", cache_bytes=2**22))
    near(forced.step(Row(text, 0, forced.pages(4))), forced.expected(text)[-1:])


def test_another_head_beside_tied_embeddings_is_refused_in_other_classes(tmp_path: Path) -> None:
    Tiny("helium", "helium", {"head_dim": 12, "tie_word_embeddings": True}).save(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(tmp_path, "lm_head.weight", embedding)
    assert mlx.accepts(read_model(tmp_path)) == ""
    change_weights(tmp_path, "lm_head.weight", embedding * 0.5)
    assert "the stored output head differs from the embedding" in mlx.accepts(read_model(tmp_path))


def change_weights(folder: Path, name: str, tensor: torch.Tensor) -> None:
    save_file({**load_file(folder / "model.safetensors"), name: tensor}, folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
def test_field_beside_text_config_ties_the_head(tied: bool, tmp_path: Path) -> None:
    """transformers writes false into text_config; the class of mlx-lm reads only that field."""

    def contradict(config: dict[str, Any]) -> None:
        config["text_config"]["tie_word_embeddings"] = not tied

    tiny = OF["mistral3-tied" if tied else "mistral3"]
    agrees(replace(tiny, rewrite=contradict), tmp_path)


@pytest.mark.parametrize("label", ["llama", "gemma3-capped"])
def test_missing_head_is_refused(tmp_path: Path, label: str) -> None:
    """mlx-lm's Gemma 3 would use the embedding."""
    OF[label].save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"no lm_head\.weight"):
        mlx.open(read_model(tmp_path), LoadOptions(dtype="float32"))


@pytest.mark.parametrize("label", REFUSED)
def test_models_that_mlx_lm_does_not_compute_are_refused(label: str, tmp_path: Path) -> None:
    OF[label].save(tmp_path)
    files = read_model(tmp_path)
    assert re.search(REFUSED[label], mlx.accepts(files))
    with pytest.raises(ModelRefused, match=REFUSED[label]):
        mlx.open(files, LoadOptions(cache_bytes=2**25, max_rows=8, page_size=PAGE, dtype="float32"))
