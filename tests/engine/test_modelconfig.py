"""Fields that config.json leaves out, or gives as null: each means what transformers' own config class makes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from localllm.engine.errors import ModelRefused
from localllm.engine.modelconfig import FAMILIES, ModelConfig, parse_config

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ELSEWHERE = ("model_type", "quantization", "quantization_config", "compression_config")  # tests of their own

# Absent in a table, they follow from other fields; transformers' validation lacks them all the same.
CLEAR = ("rope_parameters.full_attention", "rope_scaling.original_max_position_embeddings")

# A value for every field that parse_config reads, unlike each family's default: its absence makes a difference.
VALUES: dict[str, Any] = {
    "vocab_size": 40_000,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "silu",
    "max_position_embeddings": 1000,
    "original_max_position_embeddings": 500,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 11,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "layer_types": None,
    "sliding_window_pattern": 4,
    "query_pre_attn_scalar": 99,
    "final_logit_softcapping": 7.0,
    "attn_logit_softcapping": 5.0,
    "rope_theta": 777.0,
    "rope_scaling": None,
    "rope_local_base_freq": 888.0,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "dtype": "bfloat16",
    "torch_dtype": "float16",
    "eos_token_id": [7, 8],
    "use_bidirectional_attention": False,
    "is_causal": True,
    "per_layer_config": None,
    "qkv_bias": False,
    "use_qk_norm": True,
    "num_experts": 12,
    "num_local_experts": None,
    "n_routed_experts": None,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "first_k_dense_replace": 3,
    "shared_expert_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
    "topk_group": 2,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0}
YARN_LONG = {**YARN, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.3, "original_max_position_embeddings": 300}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0 + at for at in range(8)],
    "long_factor": [2.0 + at for at in range(8)],
    "original_max_position_embeddings": 300,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
TWO_KINDS = {"full_attention": {**LINEAR, "rope_theta": 500.0}, "sliding_attention": {"rope_theta": 50.0}}
FLAT = [
    {},
    {"rope_parameters": LLAMA3},
    {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 300}},
    {"rope_parameters": YARN_LONG},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_parameters": LONG, "original_max_position_embeddings": None},
    {"rope_scaling": {**YARN, "attention_factor": 1.5}},
    {"rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": LLAMA3},
    {"rope_scaling": {}, "rope_parameters": LLAMA3},
    {"partial_rotary_factor": 0.5},
]
LAYERS = ["full_attention", "sliding_attention"] * 4

# Of each family: what else its models may have.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "gemma2": [*FLAT, {"layer_types": LAYERS}, {"hidden_size": 640}],
    "gemma3_text": [
        {},
        {"layer_types": LAYERS},
        {"rope_parameters": TWO_KINDS},
        {"rope_scaling": LINEAR},
        {"rope_scaling": LINEAR, "rope_parameters": TWO_KINDS},
        {"rope_parameters": {"full_attention": {**YARN, "original_max_position_embeddings": 300}}},
    ],
    "llama": FLAT,
    "mistral": FLAT,
    "phi3": [
        {},
        {"rope_parameters": LONG},
        {"rope_scaling": {"type": "su", **{key: value for key, value in LONG.items() if key != "rope_type"}}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
    ],
    "qwen2": [*FLAT, {"layer_types": LAYERS}],
    "qwen3": [*FLAT, {"layer_types": LAYERS}],
    "gpt_oss": [
        *(
            {"num_experts": None, "num_local_experts": 6, "layer_types": LAYERS[::-1]} | variant
            for variant in FLAT[:-1]
        ),
        {"attention_bias": False},
        {"rope_theta": None},
    ],
    "mixtral": [
        *(variant | {"num_experts": None, "num_local_experts": 6} for variant in FLAT if LONG not in variant.values()),
        {},
    ],
    "qwen2_moe": [*FLAT, {"layer_types": LAYERS}, {"use_sliding_window": False}, {"max_window_layers": 40}],
    "glm4_moe": [
        {"num_experts": None, "n_routed_experts": 16},
        {"num_experts": None, "num_local_experts": 16, "norm_topk_prob": False, "first_k_dense_replace": 8},
        {"num_experts": None, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"num_experts": None, "partial_rotary_factor": 0.75, "rope_theta": 100.0},
        {"num_experts": None, "rope_parameters": {"rope_type": "default", "rope_theta": 55.0}},
        {"num_experts": None, "n_routed_experts": 16, "rope_parameters": YARN},
    ],
    "qwen3_moe": [
        *FLAT,
        {"num_experts": None, "num_local_experts": 16, "use_sliding_window": False},
        {"mlp_only_layers": [], "decoder_sparse_step": 1},
    ],
}
CASES = [(family, index) for family, variants in VARIANTS.items() for index in range(len(variants))]


def full(family: str, index: int) -> dict[str, Any]:
    values = {key: value for key, value in VALUES.items() if value is not None}
    values = {"model_type": family, **values, **VARIANTS[family][index]}
    return {key: value for key, value in copy.deepcopy(values).items() if value is not None}


def completed(values: dict[str, Any]) -> dict[str, Any] | None:
    """The config as transformers writes it again; None where it refuses."""
    try:
        made: dict[str, Any] = CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values)).to_dict()
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError):
        return None
    return made


def ours(values: dict[str, Any]) -> ModelConfig | ModelRefused:
    try:
        return parse_config(values)
    except ModelRefused as refused:
        return refused


class Recorder(dict[str, Any]):
    """Notes which fields are asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def changed(values: dict[str, Any], change: Callable[[dict[str, Any], str], Any]) -> Iterator[tuple[str, Any]]:
    """Each field in turn, and each one of a table within, without it or with null."""
    for key in values:
        if key not in ELSEWHERE:
            other = copy.deepcopy(values)
            change(other, key)
            yield key, other
    for table in ("rope_parameters", "rope_scaling"):
        for key in values.get(table, ()):
            other = copy.deepcopy(values)
            change(other[table], key)
            yield f"{table}.{key}", other


def test_every_family_and_every_field_are_here() -> None:
    assert set(VARIANTS) == set(FAMILIES), "a new family needs its variants"
    asked: set[str] = set()
    for family, index in CASES:
        recorder = Recorder(full(family, index))
        ours(recorder)
        asked |= recorder.asked
    assert asked - set(ELSEWHERE) <= set(VALUES), "a new field needs a value"


@pytest.mark.parametrize(("family", "index"), CASES)
def test_full_config(family: str, index: int) -> None:
    values = full(family, index)
    theirs = completed(values)
    assert theirs is not None, "transformers takes every config here"
    expected, found = parse_config(theirs), ours(values)
    if isinstance(found, ModelRefused):  # what transformers' config takes and its model does not
        assert "partial_rotary_factor" in str(found)
    else:
        assert found == expected


@pytest.mark.parametrize(("family", "index"), CASES)
def test_absent_field(family: str, index: int) -> None:
    for key, values in changed(full(family, index), lambda table, key: table.pop(key)):
        found, theirs = ours(values), completed(values)
        if key in REQUIRED:
            assert isinstance(found, ModelRefused), key
            assert f"{key} must be" in str(found)
        elif theirs is None:
            assert isinstance(found, ModelRefused) or key in CLEAR, key
        elif isinstance(found, ModelRefused):  # transformers' model would fail on what its config class takes
            assert isinstance(ours(theirs), ModelRefused), key
        else:
            assert found == ours(theirs), key


@pytest.mark.parametrize(("family", "index"), CASES)
def test_null_field(family: str, index: int) -> None:
    """Where transformers refuses null, it counts as absent here; so it does within a table."""
    for key, values in changed(full(family, index), lambda table, key: table.update({key: None})):
        found, theirs = ours(values), completed(values)
        table, _, inner = key.rpartition(".")
        if theirs is None or table:
            without = copy.deepcopy(values)
            (without[table] if table else without).pop(inner)
            theirs = without
        if isinstance(found, ModelRefused):
            assert isinstance(ours(theirs), ModelRefused), key
        elif key != "num_key_value_heads":
            assert found == ours(theirs), key
        else:
            assert found.num_kv_heads == found.num_heads
