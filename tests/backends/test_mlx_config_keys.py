"""Architectures of mlx-lm that ModelConfig does not describe: as transformers computes them, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import YarnRoPE
from safetensors.torch import load_file, save_file

from localllm.backends import mlx
from localllm.backends.mlx.config_keys import ConfigKeys
from localllm.backends.mlx.config_ropes import ConfigRopes
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions

from .batches import Row
from .mlx_models import rewrite
from .test_mlx_families import OF, PAGE, Forced, agrees, near, texts
from .tiny import Rewrite, Tiny, old_spelling

pytestmark = pytest.mark.real_otherdevice


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500_000.0, **more}}


EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False, attention_factor=1.3)
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.mark.parametrize("spelling", [None, old_spelling], ids=["transformers-5", "transformers-4"])
@pytest.mark.parametrize(
    "tiny",
    [
        Tiny("qwen3_moe", "qwen3_moe", {**EXPERTS, "norm_topk_prob": True, **rope("default")}),
        Tiny("mixtral", "mixtral", {"num_local_experts": 4, **rope("default")}),
        Tiny("olmo2-llama3", "olmo2", LLAMA3),
        Tiny("starcoder2-gelu", "starcoder2", {"sliding_window": None, "hidden_act": "gelu", **rope("default")}),
        Tiny("seed_oss-yarn", "seed_oss", {"head_dim": 12, **YARN}),
    ],
    ids=str,
)
def test_other_architectures_equal_transformers(tmp_path: Path, tiny: Tiny, spelling: Rewrite | None) -> None:
    agrees(replace(tiny, rewrite=spelling), tmp_path)


@pytest.mark.parametrize(
    "full",
    [rope("default"), rope("linear", factor=4.0), rope("yarn", factor=4.0, original_max_position_embeddings=32)],
    ids=["default", "linear", "yarn"],
)
def test_ropes_by_layer_type_equal_transformers(tmp_path: Path, full: dict[str, Any]) -> None:
    kinds = {"full_attention": full["rope_parameters"], "sliding_attention": rope("default")["rope_parameters"]}
    agrees(Tiny("olmo3", "olmo3", {**WINDOWS, "rope_parameters": kinds}), tmp_path)


def _null_rope(config: dict[str, Any]) -> None:
    old_spelling(config)
    config["rope_scaling"] = None


def _named_rope(config: dict[str, Any]) -> None:
    old_spelling(config)
    config["rope_scaling"] = {"type": "default", "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "spelling",
    [None, old_spelling, _null_rope, _named_rope],
    ids=["transformers-5", "transformers-4", "null", "named"],
)
def test_latent_attention_with_a_plain_rope_equals_transformers(tmp_path: Path, spelling: Rewrite | None) -> None:
    """The class of mlx-lm reads YaRN's factor without a default."""
    lite = OF["deepseek_v2-lite"]
    agrees(replace(lite, more={**lite.more, **rope("default")}, rewrite=spelling), tmp_path)


def test_class_that_fails_on_config_json_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of mlx-lm may read a field that this model lacks."""
    monkeypatch.setattr(ConfigRopes, "is_plain", False)
    lite = OF["deepseek_v2-lite"]
    replace(lite, more={**lite.more, **rope("default")}).save(tmp_path)
    message = r"its class of deepseek_v2 fails with this config\.json \(AttributeError: 'NoneType' object"
    with pytest.raises(ModelRefused, match=message) as caught:
        mlx.open(read_model(tmp_path), LoadOptions(dtype="float32"))
    assert caught.value.hint == "choose another backend, or another release of mlx-lm"


def _switched_off(config: dict[str, Any]) -> None:
    config.update(sliding_window=7, use_sliding_window=False)
    del config["layer_types"]


def test_disabled_window_equals_transformers(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4}
    tiny = Tiny("qwen2_moe", "qwen2_moe", {**sizes, "num_experts_per_tok": 2, **rope("default")})
    agrees(replace(tiny, rewrite=_switched_off), tmp_path)


def test_other_rope_base_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of mlx-lm may read another key."""
    monkeypatch.setattr(ConfigKeys, "arguments", lambda keys: {})
    Tiny("mixtral", "mixtral", {"num_local_experts": 4, **rope("default")}).save(tmp_path)
    with pytest.raises(ModelRefused, match=r"rope_theta is \{500000"):
        mlx.open(read_model(tmp_path), LoadOptions(dtype="float32"))


@pytest.mark.parametrize(
    ("model_type", "more", "name"),
    [
        ("qwen3_moe", {**EXPERTS, **YARN}, "the rope type is yarn"),
        ("qwen3_moe", {**EXPERTS, "hidden_act": "gelu_pytorch_tanh"}, "activation gelu_pytorch_tanh"),
        ("qwen3_moe", {**EXPERTS, "use_sliding_window": True}, "use_sliding_window is True"),
    ],
)
@pytest.mark.parametrize("spelling", [None, old_spelling], ids=["transformers-5", "transformers-4"])
def test_ignored_key_is_refused(
    tmp_path: Path, model_type: str, more: dict[str, Any], name: str, spelling: Rewrite | None
) -> None:
    Tiny(model_type, model_type, more, rewrite=spelling).save(tmp_path)
    with pytest.raises(ModelRefused, match=name):
        mlx.open(read_model(tmp_path), LoadOptions(dtype="float32"))


def _old_base(config: dict[str, Any]) -> None:
    """transformers uses this base in the full layers only."""
    config.pop("rope_parameters")
    config["rope_theta"] = 500.0


def _old_linear(config: dict[str, Any]) -> None:
    """transformers reads rope_type in Olmo 3, and ignores type."""
    config.pop("rope_parameters")
    config |= {"rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}


def _old_yarn(config: dict[str, Any]) -> None:
    _old_linear(config)
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def _half(config: dict[str, Any]) -> None:
    """Adds partial_rotary_factor, which transformers ignores for these architectures."""
    config["partial_rotary_factor"] = 0.5


@pytest.mark.parametrize(
    ("model_type", "more", "edit", "name"),
    [
        ("olmo3", WINDOWS, _old_base, "rope_theta is"),
        ("olmo3", WINDOWS, _old_linear, "releases of transformers disagree on `type`"),
        ("olmo3", WINDOWS, _old_yarn, "releases of transformers disagree on `type`"),
        ("seed_oss", {"head_dim": 12}, _half, "partial_rotary_factor"),
        ("gemma", {"head_dim": 12, "tie_word_embeddings": True}, _half, "partial_rotary_factor"),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, _half, "partial_rotary_factor"),
    ],
)
def test_rope_that_transformers_reads_otherwise_is_refused(
    tmp_path: Path, model_type: str, more: dict[str, Any], edit: Rewrite, name: str
) -> None:
    Tiny(model_type, model_type, more, rewrite=edit).save(tmp_path)
    with pytest.raises(ModelRefused, match=name):
        mlx.open(read_model(tmp_path), LoadOptions(dtype="float32"))


@pytest.mark.parametrize("model_type", ["gemma", "cohere", "starcoder2", "nemotron"])
def test_stored_copy_of_a_tied_embedding_is_accepted(tmp_path: Path, model_type: str) -> None:
    """The classes of these architectures have no output head, and no code that drops a stored one."""
    Tiny(model_type, model_type, {"head_dim": 12, "tie_word_embeddings": True}).save(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    assert mlx.accepts(read_model(tmp_path)) == ""


def save_as_multimodal(folder: Path) -> None:
    """Change the files of a text model to those of a multimodal model."""
    weights = load_file(folder / "model.safetensors")
    save_file({f"language_model.{name}": weight for name, weight in weights.items()}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    composite = {"model_type": "gemma3", "vocab_size": text["vocab_size"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(composite))


@pytest.mark.parametrize("spelling", [None, old_spelling], ids=["transformers-5", "transformers-4"])
def test_multimodal_model_reads_text_config(tmp_path: Path, spelling: Rewrite | None) -> None:
    """The hidden size is 64, whose root is exact in bfloat16."""
    forced = Forced(replace(OF["gemma3"], more={**OF["gemma3"].more, "hidden_size": 64}, rewrite=spelling), tmp_path)
    save_as_multimodal(tmp_path)
    forced.runner = mlx.open(read_model(tmp_path), LoadOptions(dtype="float32", cache_bytes=2**22, page_size=PAGE))
    text = texts(OF["gemma3"])[0]
    near(forced.step(Row(text, 0, forced.pages(len(text)))), forced.expected(text)[-1:])


def _published(config: dict[str, Any]) -> None:
    """A config.json as Google publishes it: values that equal the defaults of transformers are absent."""
    old_spelling(config)
    for key in ("rope_theta", "rope_local_base_freq", "rms_norm_eps"):
        del config[key]
    config["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    more = {**OF["gemma3"].more, "hidden_size": 64, "rms_norm_eps": 1e-6, "rope_parameters": ropes}
    forced = Forced(replace(OF["gemma3"], more=more, rewrite=_published), tmp_path)
    save_as_multimodal(tmp_path)
    forced.runner = mlx.open(read_model(tmp_path), LoadOptions(dtype="float32", cache_bytes=2**22, page_size=PAGE))
    text = texts(OF["gemma3"])[0]
    near(forced.step(Row(text, 0, forced.pages(len(text)))), forced.expected(text)[-1:])


def test_longrope_has_short_factors_up_to_the_original_context(tmp_path: Path) -> None:
    """mlx-lm has only the long factors."""
    factors = {
        "short_factor": [1.0 + 0.1 * index for index in range(6)],
        "long_factor": [1.0 + 0.5 * index for index in range(6)],
    }
    scaling = {**factors, "short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "sliding_window": 128}
    tiny = Tiny("phimoe", "phimoe", {**experts, **rope("longrope", **scaling)}, context=64, length=33)
    forced, text = Forced(tiny, tmp_path), texts(tiny)[0]
    near(forced.step(Row(text, 0, forced.pages(len(text)))), forced.expected(text)[-1:])


def test_layer_types_without_a_pattern_are_refused(tmp_path: Path) -> None:
    """mlx-lm's Gemma 3 knows only patterns of layers."""
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    replace(OF["gemma3"], more={**OF["gemma3"].more, "layer_types": kinds}).save(tmp_path)
    save_as_multimodal(tmp_path)
    with pytest.raises(ModelRefused, match="layer_types"):
        mlx.open(read_model(tmp_path), LoadOptions(dtype="float32"))


def test_value_that_transformers_refuses_is_refused(tmp_path: Path) -> None:
    Tiny("mixtral", "mixtral", {"num_local_experts": 4, **rope("default")}).save(tmp_path)
    rewrite(tmp_path, lambda config: config.update(num_local_experts="four"))
    with pytest.raises(ModelRefused, match=r"(?s)config.json: .*num_local_experts"):
        mlx.open(read_model(tmp_path), LoadOptions(dtype="float32"))


class Rotations(nn.Module):
    """A model that only has ropes."""

    def __init__(self, *ropes: nn.Module) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self.ropes = list(ropes)


UNKNOWN = {"model_type": "mystery", "head_dim": 12, "max_position_embeddings": 128}
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500_000.0}


@pytest.mark.parametrize(
    "values",
    [
        {**UNKNOWN, "rope_parameters": SCALED},
        {**UNKNOWN, "rope_theta": 500_000.0, "rope_scaling": {**SCALED, "rope_theta": 500_000.0}},
    ],
    ids=["transformers-5", "transformers-4"],
)
def test_architecture_that_transformers_does_not_know(values: dict[str, Any]) -> None:
    """The ropes are converted and verified, although the other keys of the architecture are unknown."""
    keys = ConfigKeys(values)
    complete = values | keys.arguments()
    assert complete["rope_theta"] == 500_000.0
    assert complete["rope_scaling"]["rope_type"] == "yarn"
    keys.verify(Rotations(YarnRoPE(12, base=500_000.0)), set(), 128)
    with pytest.raises(ModelRefused, match="the rope type is yarn"):
        keys.verify(Rotations(nn.RoPE(12, base=500_000.0)), set(), 128)
    with pytest.raises(ModelRefused, match="rope_theta is"):
        keys.verify(Rotations(nn.RoPE(12, base=10_000.0), YarnRoPE(12)), set(), 128)


def test_verify_sets_exact_frequencies() -> None:
    """mlx-lm rounds the dimensions between which the frequencies change (`truncate`)."""
    part = YarnRoPE(12, base=500_000.0, scaling_factor=4.0, original_max_position_embeddings=4096)
    rounded = part._freqs
    exact = {"original_max_position_embeddings": 4096, "truncate": False, "attention_factor": 1.5}
    keys = ConfigKeys({**UNKNOWN, "rope_parameters": {**SCALED, **exact}})
    keys.verify(Rotations(part), set(), 128)
    assert part.mscale == 1.5
    assert not mx.allclose(part._freqs, rounded, rtol=1e-2)
