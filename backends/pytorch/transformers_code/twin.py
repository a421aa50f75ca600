"""A tiny model of the same class: config.json with small sizes. All other fields keep their values."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

HEADS = 4
HEAD_DIM = 16
WINDOW = 7
MAX_LAYERS = 8

_ALL_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "decoder_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
# Names of fields -> the value in the tiny model, if the field has a value other than 0.
_SIZES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(
            ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), HEADS * HEAD_DIM
        ),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 96),
        **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size"), 96),
        **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
        **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
        **dict.fromkeys(_EXPERTS, 8),
        **dict.fromkeys((*CHOICES, "n_group", "num_expert_group"), 2),
        **dict.fromkeys(("topk_group", "first_k_dense_replace"), 1),
        "head_dim": HEAD_DIM,
        "global_head_dim": HEAD_DIM,
        "kv_channels": HEAD_DIM,
        "rotary_dim": 8,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "o_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "qk_head_dim": 16,
        "v_head_dim": 12,
        "vocab_size": 301,
        "vocab_size_per_layer_input": 301,
        "hidden_size_per_layer_input": 8,
        "max_position_embeddings": 512,
        "n_positions": 512,
        "n_ctx": 512,
        "sliding_window": WINDOW,
        "attention_window": WINDOW,
        "sliding_window_size": WINDOW,
        "attention_chunk_size": WINDOW,
        "original_max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads", "n_kv_heads")


def tiny_values(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """`values`: all fields of a configuration, which has `layers` layers -> the fields of its tiny model."""
    tiny = deepcopy(dict(values))
    count = _layers(tiny, layers)
    heads = next((int(tiny[key]) for key in ("num_attention_heads", "n_head") if tiny.get(key)), HEADS)
    for key, value in tiny.items():
        if isinstance(value, list) and len(value) == layers:
            tiny[key] = value[:count]
        elif isinstance(value, int) and not isinstance(value, bool) and value:
            tiny[key] = _small(key, value, heads, count)
    _shrink_ropes(tiny)
    if tiny.get("qk_rope_head_dim") and tiny.get("head_dim"):
        tiny["head_dim"] = tiny["qk_rope_head_dim"]
    return tiny


def _layers(values: Mapping[str, Any], layers: int) -> int:
    """The number of layers of the tiny model: enough for all kinds of layers."""
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == layers]
    dense = 1 if values.get("first_k_dense_replace") else 0
    return min(layers, max([3, *map(_covering, lists), 1 + dense]), MAX_LAYERS)


def _covering(values: list[Any]) -> int:
    """The number of first layers that have all kinds of layers, and the first kind after the others."""
    firsts = [values.index(value) for value in values if isinstance(value, str | int | bool)]
    return max(firsts, default=0) + 2


def _small(key: str, value: int, heads: int, layers: int) -> int:
    if key in _ALL_LAYERS:
        return layers
    if key in _KV_HEADS:
        return {heads: HEADS, 1: 1}.get(value, 2)
    return min(value, _SIZES.get(key, value))


def _shrink_ropes(tiny: dict[str, Any]) -> None:
    """Give the tables of ropes, which may be nested, the sizes of the tiny heads."""
    for key in ("rope_parameters", "rope_scaling"):
        table = tiny.get(key)
        if not isinstance(table, dict):
            continue
        for each in (table, *(part for part in table.values() if isinstance(part, dict))):
            if each.get("mrope_section"):
                each["mrope_section"] = [2, 3, 3]
            if each.get("original_max_position_embeddings"):
                each["original_max_position_embeddings"] = 16
