"""56 odd shapes that every backend computes like transformers, or refuses by name: head sizes 2 to 512, 1 to 16 query
heads for each key head, windows of 1 to 300 positions, biases, tied heads, rope of every kind.

Slow backends take PARAMETERS, which mark all but a sample as slow: the sample has each of these.
"""

from __future__ import annotations

from typing import Any

import pytest

from .tiny import Tiny


def _shape(
    model_type: str, dim: int, heads: int, kv_heads: int, window: int = 0, context: int | None = None, **more: Any
) -> Tiny:
    """A model of heads of `dim`; `window` slides in all of its layers, or in some where the family mixes them."""
    label = f"{model_type.removesuffix('_text')}-d{dim}-h{heads}x{kv_heads}"
    values = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 2}
    values |= {"intermediate_size": 56, "hidden_size": heads * -(-40 // heads), "head_dim": dim}
    if model_type in ("qwen2", "phi3"):  # their heads divide the hidden size
        values["hidden_size"] = heads * dim
        del values["head_dim"]
    if model_type == "gemma3_text":
        values |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": dim + 3}
        values |= {"sliding_window": window or 9}
    elif window or model_type in ("mistral", "phi3"):
        values["sliding_window"] = window or None
    if window and model_type in ("qwen2", "qwen3"):
        values |= {"use_sliding_window": True, "max_window_layers": 1}
    if window:
        label += f"-w{window}"
    for name, value in more.items():
        if name.endswith("_bias") or name == "tie_word_embeddings":
            label += f"-{name.partition('_')[0]}"
        elif name == "rope_parameters":
            label += f"-{value.get('rope_type', 'ropes')}"
    values |= {"max_position_embeddings": 512 if window > 64 else 128, **more}
    length = 45 if window <= 30 else window + 20
    return Tiny(label, model_type, values, context=context, length=length if context is None else context - 20)


def _rope(kind: str, theta: float = 500_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
_YARN = _rope("yarn", 1000.0, factor=4.0, original_max_position_embeddings=32)
_SCALED_GEMMA = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
}


def _longrope(pairs: int, partial: float = 1.0) -> dict[str, Any]:
    original = {"original_max_position_embeddings": 64}
    short, long = [1.0 + 0.05 * pair for pair in range(pairs)], [1.5 + 0.5 * pair for pair in range(pairs)]
    rope = _rope("longrope", partial_rotary_factor=partial, short_factor=short, long_factor=long, **original)
    return {**original, **rope}


SHAPES = [
    _shape("llama", 2, 4, 2),
    _shape("llama", 4, 16, 1),
    _shape("llama", 6, 3, 3, **_TIED),
    _shape("llama", 8, 8, 2, **_LLAMA3),
    _shape("llama", 10, 5, 1, attention_bias=True),
    _shape("llama", 18, 6, 2, mlp_bias=True),
    _shape("llama", 32, 12, 1, **_rope("default")),
    _shape("llama", 40, 7, 7, attention_bias=True, mlp_bias=True, **_TIED),
    _shape("llama", 56, 9, 3),
    _shape("llama", 64, 16, 1, **_LLAMA3),
    _shape("llama", 72, 4, 4),
    _shape("llama", 80, 10, 1, **_YARN),
    _shape("llama", 96, 6, 1),
    _shape("llama", 100, 3, 1, **_rope("linear", factor=4.0)),
    _shape("llama", 112, 2, 2),
    _shape("llama", 128, 16, 2),
    _shape("llama", 160, 2, 1, hidden_act="gelu_pytorch_tanh"),
    _shape("llama", 192, 4, 1),
    _shape("llama", 256, 8, 1, **_TIED),
    _shape("llama", 512, 2, 1),
    _shape("mistral", 2, 4, 4, 1),
    _shape("mistral", 12, 8, 1, 2),
    _shape("mistral", 16, 4, 2, 3, **_rope("default")),
    _shape("mistral", 24, 6, 3, 16),
    _shape("mistral", 48, 13, 1, 31),
    _shape("mistral", 64, 4, 1, 100),
    _shape("mistral", 80, 4, 2, 300),
    _shape("mistral", 120, 3, 1),
    _shape("mistral", 320, 2, 1, 7, **_TIED),
    _shape("qwen2", 4, 8, 2),
    _shape("qwen2", 8, 4, 2, 1),
    _shape("qwen2", 14, 3, 1, **_TIED),
    _shape("qwen2", 16, 14, 2, 64),
    _shape("qwen2", 20, 4, 4, 5, **_rope("default")),
    _shape("qwen2", 64, 7, 1),
    _shape("qwen2", 96, 2, 1, **_YARN),
    _shape("qwen2", 128, 2, 2, 150),
    _shape("qwen3", 2, 16, 1),
    _shape("qwen3", 8, 11, 1, 4),
    _shape("qwen3", 32, 8, 8, attention_bias=True),
    _shape("qwen3", 64, 16, 8, **_TIED, **_rope("default")),
    _shape("qwen3", 88, 4, 1, **_YARN),
    _shape("qwen3", 128, 15, 1, 200),
    _shape("qwen3", 256, 2, 2, attention_bias=True, **_TIED),
    _shape("gemma3_text", 4, 4, 1, 1, **_TIED),
    _shape("gemma3_text", 16, 8, 4, 2, **_TIED, **_SCALED_GEMMA),
    _shape("gemma3_text", 64, 2, 1, 33, **_UNTIED),
    _shape("gemma3_text", 168, 4, 2, 12, **_TIED, attention_bias=True),
    _shape("gemma3_text", 256, 4, 1, 300, **_TIED, final_logit_softcapping=2.0),
    _shape("gemma3_text", 512, 2, 1, 8, **_TIED, hidden_activation="silu"),
    _shape("phi3", 4, 4, 2),
    _shape("phi3", 12, 3, 1, 9, **_rope("default", partial_rotary_factor=0.5)),
    _shape("phi3", 20, 8, 4, context=64, **_longrope(5, 0.5)),
    _shape("phi3", 32, 4, 4, 40, **_TIED),
    _shape("phi3", 64, 4, 2, context=128, **_longrope(32)),
    _shape("phi3", 96, 4, 1, 128),
]

SAMPLED = (
    "llama-d2-h4x2",
    "llama-d10-h5x1-attention",
    "llama-d18-h6x2-mlp",
    "llama-d64-h16x1-llama3",
    "llama-d160-h2x1",
    "llama-d512-h2x1",
    "mistral-d2-h4x4-w1",
    "mistral-d80-h4x2-w300",
    "qwen2-d20-h4x4-w5-default",
    "qwen3-d88-h4x1-yarn",
    "gemma3-d16-h8x4-w2-tie-ropes",
    "gemma3-d168-h4x2-w12-tie-attention",
    "phi3-d12-h3x1-w9-default",
    "phi3-d20-h8x4-longrope",
)
PARAMETERS = [pytest.param(shape, marks=() if shape.label in SAMPLED else pytest.mark.slow) for shape in SHAPES]
