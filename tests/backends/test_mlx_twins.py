"""Every class of mlx-lm that the backend accepts has a twin in transformers: the log-probabilities are equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx_lm
import numpy as np
from huggingface_hub.errors import StrictDataclassError
from mlx_lm.utils import MODEL_REMAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from localllm.backends import mlx
from localllm.backends.mlx import architectures
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_architecture, read_model
from localllm.engine.options import LoadOptions

from .batches import Row
from .checkpoints import GPT_OSS
from .mlx_models import rewrite
from .mlx_twins import TWINS
from .test_mlx_families import BOUND, OF, REFUSED, Forced, agrees, texts
from .tiny import TINIES, Tiny
from .twin import published, rope

pytestmark = pytest.mark.real_otherdevice

OF_TWINS = {twin.label: twin for twin in TWINS}
# Models of test_mlx_families.py whose values the class of mlx-lm reads from config.json.
OF_CLASSES = [OF[label] for label in ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "granite", "glm4", "ministral3")]


@pytest.mark.parametrize("twin", TWINS, ids=str)
def test_twin_equals_transformers(twin: Tiny, tmp_path: Path) -> None:
    agrees(twin, tmp_path)
    assert mlx.accepts(read_architecture(tmp_path)) == "", "config.json alone decides before a download"


def _types(values: Mapping[str, Any]) -> tuple[str, str]:
    """(model_type, model_type of its text model). The second is empty without a text model."""
    return values["model_type"], (values.get("text_config") or {}).get("model_type", "")


def _types_of(tiny: Tiny) -> tuple[str, str]:
    values = tiny.config().to_dict()
    if tiny.rewrite:
        tiny.rewrite(values)
    return _types(values)


def test_every_accepted_class_has_a_twin() -> None:
    """test_mlx_families.py compares GPT_OSS, and the TINIES that are not REFUSED."""
    compared = {_types_of(tiny) for tiny in (*TWINS, *TINIES, GPT_OSS) if tiny.label not in REFUSED}
    modules = {file.stem for file in (Path(mlx_lm.__path__[0]) / "models").glob("*.py")}
    names = modules | {*CONFIG_MAPPING, *MODEL_REMAPPING, *architectures.VERIFIED, *architectures.MULTIMODAL}
    configs: list[dict[str, Any]] = [{"model_type": name} for name in names - architectures.MULTIMODAL.keys()]
    for name in architectures.MULTIMODAL:
        configs += [{"model_type": name, "text_config": {"model_type": text}} for text in names]
    accepted = {_types(config) for config in configs if not architectures.refusal(config)}
    assert accepted - compared == set()
    assert len(accepted) > 60


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("ernie4_5_moe", "mlx-lm computes ernie4_5_moe differently from transformers: it drops the correction bias"),
        ("gemma2", "mlx-lm computes gemma2 differently from transformers"),
        ("falcon_mamba", "layers of falcon_mamba store other states"),
        ("mystery", "mystery is not among the architectures that mlx-lm computes as transformers does"),
        ("switch_layers", "switch_layers is not among the architectures"),
    ],
)
def test_other_classes_are_refused_by_name(model_type: str, reason: str, tmp_path: Path) -> None:
    Tiny("llama", "llama", rewrite=published(model_type=model_type)).save(tmp_path)
    assert mlx.accepts(read_architecture(tmp_path)).startswith(reason)


@pytest.mark.parametrize(
    "twin",
    [
        Tiny("gemma", "gemma", {"head_dim": 16, "tie_word_embeddings": True, "hidden_act": "gelu", **rope()}),
        Tiny("gemma-silu", "gemma", {"head_dim": 16, "tie_word_embeddings": True, "hidden_act": "silu", **rope()}),
        Tiny("phi-gelu_fast", "phi", {"hidden_act": "gelu_fast", **rope(partial_rotary_factor=0.5)}),
        Tiny("helium-swish", "helium", {"hidden_act": "swish", "head_dim": 12, **rope()}),
    ],
    ids=str,
)
def test_activation_is_that_of_config_json(twin: Tiny, tmp_path: Path) -> None:
    agrees(twin, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "activation"), [("phi", "gelu"), ("nemotron", "relu"), ("helium", "gelu_new"), ("helium", "mish")]
)
def test_other_activation_is_refused(model_type: str, activation: str, tmp_path: Path) -> None:
    next(twin for twin in TWINS if twin.model_type == model_type).save(tmp_path)
    rewrite(tmp_path, lambda config: config.update(hidden_act=activation))
    files = read_model(tmp_path)
    assert f"config.json has the activation {activation}" in mlx.accepts(files)
    with pytest.raises(ModelRefused, match=f"config.json has the activation {activation}"):
        mlx.open(files, LoadOptions(dtype="float32"))


@pytest.mark.parametrize(
    ("label", "key", "value"),
    [
        ("phimoe", "num_experts_per_tok", 3),
        ("exaone4-full", "sliding_window", 7),
        ("qwen3_vl_moe", "sliding_window", 7),
    ],
)
def test_value_that_a_class_reads_otherwise_is_refused(label: str, key: str, value: int, tmp_path: Path) -> None:
    twin = OF_TWINS[label]
    replace(twin, more={**twin.more, key: value}).save(tmp_path)
    assert f"as config.json says: {key} is {value}" in mlx.accepts(read_model(tmp_path))


# Keys whose values are sizes, or have no effect on logits.
_SIZES = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size head_dim "
    "max_position_embeddings bos_token_id eos_token_id pad_token_id moe_intermediate_size kv_lora_rank q_lora_rank "
    "qk_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim tie_word_embeddings topk_group".split()
)
# Without a twin whose tokens read all experts of the chosen group: one expert more would be of an excluded group.
CHANGED = [twin for twin in (*TWINS, *OF_CLASSES) if twin.label != "dots1-all-of-a-group"]
_COUNTS = frozenset("n_group num_experts_per_tok moe_k first_k_dense_replace sliding_window rotary_dim".split())


def changed(key: str, value: Any) -> Any:
    """Another value of a key; None for a key that is not changed."""
    if key in _SIZES or key.endswith(("_token_id", "_dict")) or key.startswith(("output_", "is_", "add_cross")):
        return None
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value * 1.5 or 0.5
    return value + 1 if key in _COUNTS and isinstance(value, int) else None


@pytest.mark.slow
@pytest.mark.parametrize("twin", CHANGED, ids=str)
def test_other_value_of_each_key_is_computed_or_refused(twin: Tiny, tmp_path: Path) -> None:
    """Flags, factors and counts of config.json. transformers itself refuses some of these values."""
    config = twin.config().to_dict()
    values = config.get("text_config") or config
    others = {key: changed(key, value) for key, value in values.items()}
    for key, value in others.items():
        folder = tmp_path / key
        if value is None or not _saves(model := replace(twin, more={**twin.more, key: value}), folder):
            continue
        if not mlx.accepts(read_model(folder)):
            forced, text = Forced(model, folder), texts(twin)[0]
            pages = forced.pages(len(text))
            np.testing.assert_allclose(
                forced.step(Row(text, 0, pages)), forced.expected(text)[-1:], rtol=0, atol=BOUND, err_msg=key
            )


def _saves(model: Tiny, folder: Path) -> bool:
    """Whether transformers and the engine read the model."""
    try:
        model.save(folder)
        read_model(folder)
    except (ModelRefused, StrictDataclassError, ValueError, TypeError, RuntimeError, LookupError, AssertionError):
        return False
    return True


def test_more_layers_than_the_files_have_are_refused(tmp_path: Path) -> None:
    """The class would create all of them."""
    next(twin for twin in TWINS if twin.label == "helium").save(tmp_path)
    rewrite(tmp_path, lambda config: config.update(num_hidden_layers=10**9))
    for files in (read_model(tmp_path), read_architecture(tmp_path)):
        assert "config.json has 1000000000 layers" in mlx.accepts(files)
