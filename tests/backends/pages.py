"""Tiny models of architectures that test_parity.py walks once, not in all the ways of TINIES."""

from __future__ import annotations

from .tiny import Tiny, as_type
from .twin import (
    EXPERTS,
    GEMMA,
    LAST_FULL,
    LATENT,
    LLAMA3,
    MHA,
    QWEN_VISION,
    ROUTED,
    VISION,
    WINDOWS,
    YARN,
    Twin,
    by_kind,
    flat,
    published_text,
    rope,
    transposed_experts,
)

PAGES: list[Tiny] = [
    Twin(
        "gemma3",
        "gemma3",
        {
            **GEMMA,
            **WINDOWS,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 20,
            "hidden_size": 64,
            **by_kind(rope("linear", factor=8.0), rope(rope_theta=100.0)),
        },
        text_type="gemma3_text",
        parts={"vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 16}},
    ),
    Twin(
        "qwen2_vl",
        "qwen2_vl",
        {**rope(mrope_section=[1, 2, 3])},
        text_type="qwen2_vl_text",
        parts={"vision_config": QWEN_VISION},
    ),
    Twin(
        "qwen2_vl-published",
        "qwen2_vl",
        {**rope(mrope_section=[1, 2, 3])},
        text_type="qwen2_vl_text",
        parts={"vision_config": QWEN_VISION},
        rewrite=flat,
    ),
    Twin(
        "qwen2_5_vl",
        "qwen2_5_vl",
        {**rope(mrope_section=[1, 2, 3])},
        text_type="qwen2_5_vl_text",
        parts={"vision_config": QWEN_VISION},
    ),
    Twin(
        "qwen3_vl",
        "qwen3_vl",
        {"head_dim": 16, **rope(mrope_section=[2, 3, 3])},
        text_type="qwen3_vl_text",
        parts={"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}},
    ),
    Twin(
        "qwen3_vl_moe",
        "qwen3_vl_moe",
        {**EXPERTS, "head_dim": 16, "tie_word_embeddings": False, **rope(mrope_section=[2, 3, 3])},
        text_type="qwen3_vl_moe_text",
        parts={"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}, "tie_word_embeddings": False},
        rewrite=published_text(norm_topk_prob=True),
        stored=transposed_experts,
    ),
    Tiny("exaone4", "exaone4", {**WINDOWS, **LAST_FULL, "head_dim": 16, "sliding_window_pattern": "LLLG", **LLAMA3}),
    Tiny(
        "exaone4-full",
        "exaone4",
        {
            "head_dim": 16,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 3,
            "sliding_window": None,
            "tie_word_embeddings": True,
            **LLAMA3,
        },
    ),
    Tiny("gemma", "gemma", {"head_dim": 16, "tie_word_embeddings": True, **rope()}),
    Tiny("glm", "glm", {"head_dim": 16, "attention_bias": True, **rope(partial_rotary_factor=0.5)}),
    Tiny("glm4_moe_lite", "glm4_moe_lite", {**MHA, **LATENT, **ROUTED, "n_group": 2, "topk_group": 1, **rope()}),
    Tiny(
        "olmo3",
        "olmo3",
        {**WINDOWS, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], **by_kind(YARN, rope())},
    ),
    Tiny("seed_oss", "seed_oss", {"head_dim": 12, "attention_out_bias": False, "mlp_bias": False, **rope()}),
    Tiny(
        "kimi_k2",
        "deepseek_v3",
        {**MHA, **LATENT, **ROUTED, "n_group": 1, "topk_group": 1, **YARN},
        rewrite=as_type("kimi_k2"),
    ),
]
