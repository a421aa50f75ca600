"""Fields that config.json leaves out, or gives as null: each has the value that transformers' config class gives it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from localllm.engine.errors import ModelRefused
from localllm.engine.files.families import FAMILIES
from localllm.engine.files.model_config import ModelConfig, parse_config

from ...backends.pages import PAGES

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ELSEWHERE = ("model_type", "quantization", "quantization_config", "compression_config")  # tests of their own

# Absent in a table, they follow from other fields; transformers' validation lacks them all the same.
CLEAR = ("rope_parameters.full_attention", "rope_scaling.original_max_position_embeddings")

NULL_IS_FALSE = ("norm_topk_prob", "rope_interleave", "truncate")

# A value for every field that parse_config reads, unlike each family's default: its absence makes a difference.
VALUES: dict[str, Any] = {
    "vocab_size": 160_000,
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
    "layer_norm_eps": 1e-3,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
    "sliding_window": 11,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "layer_types": None,
    "sliding_window_pattern": 4,
    "query_pre_attn_scalar": 99,
    "final_logit_softcapping": 7.0,
    "attn_logit_softcapping": 5.0,
    "attention_multiplier": 0.02,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "no_rope_layers": [0, 1, 1, 1, 0, 1, 1, 0, 1],
    "no_rope_layer_interval": 3,
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
    "topk_method": None,
    "scoring_func": None,
    "moe_layer_freq": 1,
    "mlp_layer_types": None,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 900,
    "attn_temperature_tuning": True,
    "attn_scale": 0.2,
    "floor_scale": 50,
    "moe_layers": None,
    "interleave_moe_layer_step": 2,
    "global_head_dim": 24,
    "num_global_key_value_heads": 8,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 500,
    "enable_moe_block": True,
    "top_k_experts": 3,
    "use_bias": True,
    "clip_qkv": None,
    "position_embedding_type": "rope",
    "rotary_dim": 8,
    "layers_block_type": None,
    "shared_intermediate_size": 48,
    "moe_k": None,
    "moe_num_experts": None,
    "moe_num_shared_experts": 3,
    "moe_layer_start_index": 2,
    "moe_layer_end_index": 6,
    "moe_layer_interval": 2,
    "moe_norm_min": 1e-9,
    "kv_lora_rank": 40,
    "q_lora_rank": 30,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 20,
    "v_head_dim": 12,
    "rope_interleave": False,
    "full_attention_interval": 3,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "attn_output_gate": True,
    "norm_eps": 1e-3,
    "full_attn_idxs": None,
    "tie_embedding": None,
    "block_ff_dim": None,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 0.7,
    "block_multiple_of": 100,
    "num_dense_layers": 3,
    "conv_L_cache": 4,
    "conv_bias": True,
    "use_expert_bias": True,
    "mamba_n_heads": 32,
    "mamba_n_groups": 4,
    "mamba_d_state": 24,
    "mamba_d_head": 32,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
    "time_step_limit": None,
    "attn_layer_indices": None,
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
BETA = {"llama_4_scaling_beta": 0.2}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}
ATTENTION = {"layer_types": ["attention"] * 8}
NO_EXPERTS = {"num_experts": None}
PROPORTIONAL = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
GEMMA_4 = {"num_experts_per_tok": None, "use_bidirectional_attention": None, "attention_chunk_size": None}
LLAMA_4 = {"vocab_size": 210_000, "num_experts": None, "num_local_experts": 6, "no_rope_layers": [0, 1, 1, 1] * 2}
LAYERS = ["full_attention", "sliding_attention"] * 4
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 4}
PARTIAL = {**MROPE, "partial_rotary_factor": 0.5, "rope_theta": 500.0}
MAMBA = {"hidden_act": "silu"}
CONV = {"layer_types": ["conv", "full_attention"] * 4}
DEEPSEEK = {"num_key_value_heads": 32, "num_experts": None, "n_routed_experts": 16}
SCALED = [variant for variant in FLAT if LONG not in variant.values()]

# Other values that the models of each family may have.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "bamba": [{**MAMBA, "attn_layer_indices": [1, 4]}, {**MAMBA, "attn_layer_indices": [2], "mamba_d_head": "auto"}],
    "cohere": [{"vocab_size": 256_000, "use_qk_norm": False, "logit_scale": 0.5}],
    "cohere2": [{"vocab_size": 256_000}, {"vocab_size": 256_000, "layer_types": LAYERS}],
    "deepseek_v2": [
        *({**DEEPSEEK, "norm_topk_prob": False, "topk_method": "greedy"} | variant for variant in SCALED),
        {**DEEPSEEK, "norm_topk_prob": False, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
        {**DEEPSEEK, "norm_topk_prob": None, "q_lora_rank": None, "attention_bias": False},
    ],
    "deepseek_v3": [
        *(DEEPSEEK | variant for variant in SCALED),
        {**DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 4, "norm_topk_prob": False},
        {**DEEPSEEK, "num_attention_heads": 128, "num_key_value_heads": 128},
    ],
    "gemma2": [*FLAT, {"layer_types": LAYERS}, {"hidden_size": 640}],
    "gemma3_text": [
        {},
        {"layer_types": LAYERS},
        {"rope_parameters": TWO_KINDS},
        {"rope_scaling": LINEAR},
        {"rope_scaling": LINEAR, "rope_parameters": TWO_KINDS},
        {"rope_parameters": {"full_attention": {**YARN, "original_max_position_embeddings": 300}}},
    ],
    "dots1": [{"num_experts": None, "n_routed_experts": 16, "max_window_layers": 4}],
    "ernie4_5": [{}, {"use_bias": False, "tie_word_embeddings": False}],
    "ernie4_5_moe": [{**NO_EXPERTS, "num_experts_per_tok": None, "moe_num_experts": 12, "moe_k": 3, "use_bias": None}],
    "exaone4": [
        {"sliding_window_pattern": 2},
        {"sliding_window_pattern": "LG", "layer_types": LAYERS, "rope_parameters": LLAMA3},
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 8},
    ],
    "gemma": [{}, {"hidden_act": "gelu", "rope_theta": None}],
    "gemma4_text": [
        {**GEMMA_4, "layer_types": LAYERS},
        {**GEMMA_4, "enable_moe_block": False, "attention_k_eq_v": False, "num_kv_shared_layers": 1},
        {**GEMMA_4, "use_bidirectional_attention": "vision", "rope_parameters": PROPORTIONAL},
    ],
    "glm": [{}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}],
    "glm4_moe_lite": [
        {**DEEPSEEK, "head_dim": None, "first_k_dense_replace": 1},
        {**DEEPSEEK, "head_dim": None, "topk_method": "noaux_tc", "mlp_layer_types": ["dense", "sparse"] * 4},
    ],
    "glm4": [variant for variant in FLAT if LONG not in variant.values()],
    "granite": FLAT,
    "granitemoe": [{"num_experts": None, "num_local_experts": 6}],
    "granitemoehybrid": [
        {"num_experts": None, "num_local_experts": 6, **ATTENTION},
        {"num_experts": None, "num_local_experts": 0, "position_embedding_type": None, **ATTENTION},
        {**MAMBA, "num_experts": None, "num_local_experts": 0, "layer_types": ["mamba", "attention"] * 4},
    ],
    "hunyuan_v1_dense": [{}],
    "lfm2": [
        {"full_attn_idxs": [1, 2, 9], "tie_embedding": False},
        {**CONV, "block_ff_dim": 300, "rope_parameters": LLAMA3},
        {"block_auto_adjust_ff_dim": False},
    ],
    "lfm2_moe": [CONV, {**CONV, "tie_embedding": False, "num_dense_layers": 8}],
    "llama": FLAT,
    "ministral3": [
        {},
        {"rope_parameters": {**YARN, **BETA}, "original_max_position_embeddings": None},
        {"rope_parameters": {**YARN_LONG, **BETA}},
        {"rope_parameters": {**LLAMA3, **BETA}, "sliding_window": None},
        {"rope_parameters": {"rope_type": "default", "original_max_position_embeddings": 300, **BETA}},
        {"rope_parameters": {**LINEAR, "original_max_position_embeddings": 300, **BETA}},
        {"rope_scaling": {**YARN, **BETA}},
    ],
    "llama4_text": [
        {**LLAMA_4, "rope_scaling": LLAMA3},
        {**LLAMA_4, "no_rope_layers": [], "moe_layers": [1, 2], "attn_temperature_tuning": False},
    ],
    "minimax_m2": [{"vocab_size": 220_000, "num_experts": None, "num_local_experts": 12}],
    "mistral": FLAT,
    "olmo2": FLAT,
    "olmoe": [{}],
    "olmo3": [{}, {"rope_scaling": {**YARN, "attention_factor": 1.2}}, {"rope_parameters": TWO_KINDS}],
    "qwen2_5_vl_text": [{}, {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}],
    "qwen2_vl_text": [{}],
    "qwen3_vl_text": [{"rope_scaling": MROPE}],
    "qwen3_vl_moe_text": [{"rope_scaling": MROPE}],
    "qwen3_5_moe_text": [{"rope_parameters": PARTIAL}, HYBRID],
    "qwen3_5_text": [{"rope_parameters": PARTIAL}, HYBRID, {"rope_parameters": YARN_LONG}],
    "qwen3_next": [{}, {**HYBRID, "rope_parameters": LLAMA3}, {"partial_rotary_factor": 0.5}],
    "seed_oss": [{}],
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
    "smollm3": [*FLAT, {"layer_types": LAYERS}, {"use_sliding_window": False}],
    "qwen3_moe": [
        *FLAT,
        {"num_experts": None, "num_local_experts": 16, "use_sliding_window": False},
        {"mlp_only_layers": [], "decoder_sparse_step": 1},
    ],
}
CASES = [(family, index) for family, variants in VARIANTS.items() for index in range(len(variants))]
# Each test of one field compares dozens of configurations. Those of later variants are slow, and those of architectures
# that tests/backends/pages.py walks.
WALKED_ONCE = {page.model_type for page in PAGES} | {getattr(page, "text_type", "") for page in PAGES}
FIELDS = [
    pytest.param(*case, marks=[pytest.mark.slow] if case[1] > 2 or case[0] in WALKED_ONCE - {"gemma3_text"} else [])
    for case in CASES
]


def full(family: str, index: int) -> dict[str, Any]:
    values = {key: value for key, value in VALUES.items() if value is not None}
    values = {"model_type": family, **values, **VARIANTS[family][index]}
    return {key: value for key, value in copy.deepcopy(values).items() if value is not None}


def completed(values: dict[str, Any]) -> dict[str, Any] | None:
    """The config as transformers writes it again; None where it refuses."""
    try:
        made: dict[str, Any] = CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values)).to_dict()
    except (ValueError, LookupError, TypeError, AttributeError, StrictDataclassError):
        return None
    return made


def ours(values: dict[str, Any]) -> ModelConfig | ModelRefused:
    try:
        return parse_config(values)
    except ModelRefused as refused:
        return refused


class Recorder(dict[str, Any]):
    """Notes which fields are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read_keys: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read_keys.add(key)
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
    assert {*VARIANTS, "kimi_k2"} == set(FAMILIES), "a new family needs its variants"
    assert FAMILIES["kimi_k2"] is FAMILIES["deepseek_v3"], "transformers has no class for it"
    read_keys: set[str] = set()
    for family, index in CASES:
        recorder = Recorder(full(family, index))
        ours(recorder)
        read_keys |= recorder.read_keys
    assert read_keys - set(ELSEWHERE) <= set(VALUES), "a new field needs a value"


@pytest.mark.parametrize(("family", "index"), CASES)
def test_full_config(family: str, index: int) -> None:
    values = full(family, index)
    theirs = completed(values)
    assert theirs is not None, "transformers takes every config here"
    expected = parse_config(theirs)
    actual = ours(values)
    if isinstance(actual, ModelRefused):  # transformers' config class accepts the value, but its model does not
        assert "partial_rotary_factor" in str(actual)
    else:
        assert actual == expected


def test_two_sizes_of_the_rotated_part_are_refused() -> None:
    values = full("glm4_moe_lite", 0)
    assert isinstance(ours({**values, "head_dim": 20}), ModelConfig)
    assert "head_dim must be equal to qk_rope_head_dim (20)" in str(ours({**values, "head_dim": 24}))


def _default_size(family: str, key: str) -> int:
    one = FAMILIES[family]
    return {"vocab_size": one.vocab, "num_attention_heads": one.heads, "intermediate_size": one.inner}.get(key, 0)


@pytest.mark.parametrize(("family", "index"), FIELDS)
def test_absent_field(family: str, index: int) -> None:
    for key, values in changed(full(family, index), lambda table, key: table.pop(key)):
        actual = ours(values)
        theirs = completed(values)
        if key in REQUIRED and not _default_size(family, key):
            assert isinstance(actual, ModelRefused), key
            assert f"{key} must be" in str(actual)
        elif theirs is None:
            assert isinstance(actual, ModelRefused) or key in CLEAR, key
        elif isinstance(actual, ModelRefused):  # transformers' config class accepts the value, but its model would fail
            assert isinstance(ours(theirs), ModelRefused), key
        else:
            assert actual == ours(theirs), key


@pytest.mark.parametrize(("family", "index"), FIELDS)
def test_null_field(family: str, index: int) -> None:
    """Where transformers refuses null, it counts as absent here; so it does within a table. In some fields it means
    false, as the models of transformers read it."""
    for key, values in changed(full(family, index), lambda table, key: table.update({key: None})):
        actual = ours(values)
        try:
            theirs = completed(values)
        except ZeroDivisionError:  # transformers fails for EXAONE 4 with null
            assert isinstance(actual, ModelRefused)
            continue
        table, _, inner = key.rpartition(".")
        if inner in NULL_IS_FALSE and not (table and FAMILIES[family].ropes_by_kind):
            theirs = copy.deepcopy(values)
            (theirs[table] if table else theirs)[inner] = False
        elif theirs is None or table:
            without = copy.deepcopy(values)
            (without[table] if table else without).pop(inner)
            theirs = without
        if isinstance(actual, ModelRefused):
            assert isinstance(ours(theirs), ModelRefused), key
        elif key != "num_key_value_heads":
            assert actual == ours(theirs), key
        else:
            assert actual.num_kv_heads == actual.num_heads
