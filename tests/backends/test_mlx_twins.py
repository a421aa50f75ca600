"""Every class of mlx-lm that the backend accepts has a twin in transformers: the log-probabilities are equal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx_lm
from mlx_lm.utils import MODEL_REMAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from localllm.backends import mlx
from localllm.backends.mlx import architectures
from localllm.engine.errors import ModelRefused
from localllm.engine.modelfiles import read_architecture, read_model
from localllm.engine.options import LoadOptions

from .checkpoints import GPT_OSS
from .mlx_models import rewrite
from .mlx_twins import TWINS, published, rope
from .test_mlx_families import REFUSED, agrees
from .tiny import TINIES, Tiny

pytestmark = pytest.mark.real_otherdevice


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
        ("qwen3_next", "layers of qwen3_next store other states than keys and values"),
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
    ("model_type", "activation"), [("phi", "gelu"), ("nemotron", "relu"), ("helium", "gelu_new"), ("gemma", "mish")]
)
def test_other_activation_is_refused(model_type: str, activation: str, tmp_path: Path) -> None:
    next(twin for twin in TWINS if twin.model_type == model_type).save(tmp_path)
    rewrite(tmp_path, lambda config: config.update(hidden_act=activation))
    files = read_model(tmp_path)
    assert f"config.json has the activation {activation}" in mlx.accepts(files)
    with pytest.raises(ModelRefused, match=f"config.json has the activation {activation}"):
        mlx.open(files, LoadOptions(dtype="float32"))


def test_more_layers_than_the_files_have_are_refused(tmp_path: Path) -> None:
    """The class would create all of them."""
    next(twin for twin in TWINS if twin.label == "helium").save(tmp_path)
    rewrite(tmp_path, lambda config: config.update(num_hidden_layers=10**9))
    for files in (read_model(tmp_path), read_architecture(tmp_path)):
        assert "config.json has 1000000000 layers" in mlx.accepts(files)
