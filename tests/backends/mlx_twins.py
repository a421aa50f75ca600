"""Tiny twins in transformers of the classes of mlx-lm: one model at least for each class that the backend accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from .tiny import VOCAB, Rewrite, Tiny, as_type

Tensors = dict[str, torch.Tensor]
Stored = Callable[[Tensors], Tensors]


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **more}}


def by_kind(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_parameters": {"full_attention": full["rope_parameters"], "sliding_attention": sliding["rope_parameters"]}
    }


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
WINDOWS: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 7, "layer_types": KINDS}
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "q_lora_rank": 20}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
KINDS_4 = ["sliding_attention"] * 3 + ["full_attention"]
LAST_FULL = {"layer_types": KINDS_4}
MHA = {"num_key_value_heads": 4}


def published(**keys: Any) -> Rewrite:
    """Keys of published files that transformers 5 does not write."""
    return lambda config: config.update(keys)


def published_text(**keys: Any) -> Rewrite:
    return lambda config: config["text_config"].update(keys)


@dataclass(frozen=True)
class Twin(Tiny):
    """A tiny model whose files have the layout of published files."""

    text_type: str = ""  # the text model of a multimodal model: `more` has its fields, `parts` the others
    parts: Mapping[str, Any] = field(default_factory=dict)
    stored: Stored | None = None  # changes the tensors after saving

    @property
    def auto(self) -> Any:
        return AutoModelForImageTextToText if self.text_type else AutoModelForCausalLM

    def config(self) -> PreTrainedConfig:
        if not self.text_type:
            return super().config()
        text = Tiny("", self.text_type, self.more).config().to_dict()
        return AutoConfig.for_model(self.model_type, text_config=text, vocab_size=VOCAB, **deepcopy(dict(self.parts)))

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model = super().save(folder, dtype)
        if self.stored:
            file = folder / "model.safetensors"
            tensors = self.stored(load_file(file))
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        return model


def transposed_experts(tensors: Tensors) -> Tensors:
    return {name: x.mT if ".experts." in name else x for name, x in tensors.items()}


def without(prefix: str) -> Stored:
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "embed_dim": 16,
}

PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 16}
GEMMA = {"head_dim": 16, "tie_word_embeddings": True}


def _published_gemma4(config: dict[str, Any]) -> None:
    del config["text_config"]["per_layer_config"]
    config["text_config"]["global_head_dim"] = 32


def _flat(config: dict[str, Any]) -> None:
    """The layout of published Qwen2-VL configurations."""
    text = config.pop("text_config")
    del text["model_type"]
    config.update(
        {
            **text,
            "rope_theta": text.pop("rope_parameters")["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]},
        }
    )


GEMMA4 = {
    **GEMMA,
    **WINDOWS,
    **LAST_FULL,
    "hidden_size": 64,
    "vocab_size_per_layer_input": 131,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 32,
    "final_logit_softcapping": 9.0,
    **by_kind(rope("proportional", partial_rotary_factor=0.25), rope(rope_theta=100.0)),
}
NEW = [
    Tiny(
        "afmoe",
        "afmoe",
        {
            **WINDOWS,
            **EXPERTS,
            "head_dim": 16,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "mup_enabled": True,
            **rope(),
        },
    ),
    Tiny("apertus", "apertus", {**LLAMA3}, rewrite=published(mlp_bias=False, post_norm=False, qk_norm=True)),
    Tiny("cohere", "cohere", {"tie_word_embeddings": True, "logit_scale": 0.5, **rope()}),
    Tiny("cohere-qk", "cohere", {"tie_word_embeddings": True, "use_qk_norm": True, "logit_scale": 0.5, **rope()}),
    Tiny(
        "cohere2",
        "cohere2",
        {**WINDOWS, **LAST_FULL, "head_dim": 12, "tie_word_embeddings": True, "logit_scale": 0.5, **rope()},
    ),
    Tiny(
        "cohere2-wide",
        "cohere2",
        {
            **WINDOWS,
            **LAST_FULL,
            "head_dim": 16,
            "hidden_size": 64,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "logit_scale": 0.5,
            **rope(),
        },
    ),
    Tiny("dots1", "dots1", {**ROUTED, "head_dim": 12, "sliding_window": None, **rope()}),
    Tiny(
        "dots1-groups",
        "dots1",
        {**ROUTED, "head_dim": 12, "n_group": 4, "topk_group": 2, "sliding_window": None, **rope()},
    ),
    Tiny(
        "dots1-all-of-a-group",  # also experts with negative scores
        "dots1",
        {
            **ROUTED,
            "num_experts_per_tok": 4,
            "head_dim": 12,
            "n_group": 2,
            "topk_group": 1,
            "sliding_window": None,
            **rope(),
        },
    ),
    Tiny("ernie4_5", "ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True, **rope()}),
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
    Tiny(
        "exaone_moe",
        "exaone_moe",
        {
            **WINDOWS,
            **EXPERTS,
            **LAST_FULL,
            "head_dim": 16,
            "n_group": 2,
            "topk_group": 1,
            "num_shared_experts": 1,
            **rope(),
        },
        rewrite=published(is_moe_layer=[False, True, True, True]),
    ),
    Tiny("gemma", "gemma", {"head_dim": 16, "tie_word_embeddings": True, **rope()}),
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
    Tiny("gemma4_text", "gemma4_text", GEMMA4),
    Tiny(
        "gemma4_text-shared",
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 8,
            "layer_types": KINDS_4 * 2,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
        },
    ),
    Tiny(
        "gemma4_text-experts",
        "gemma4_text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 262144,
        },
    ),
    Twin(
        "gemma4",
        "gemma4",
        GEMMA4,
        text_type="gemma4_text",
        rewrite=_published_gemma4,
        parts={"vision_config": {"model_type": "gemma4_vision", **VISION, "head_dim": 8, "num_key_value_heads": 2}},
    ),
    Tiny("glm", "glm", {"head_dim": 16, "attention_bias": True, **rope(partial_rotary_factor=0.5)}),
    Tiny("glm4_moe_lite", "glm4_moe_lite", {**MHA, **LATENT, **ROUTED, "n_group": 2, "topk_group": 1, **rope()}),
    Twin(
        "gpt2",
        "gpt2",
        {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128, "tie_word_embeddings": True},
        rewrite=published(n_ctx=128),
        stored=without("transformer."),
    ),
    Tiny(
        "gpt_neox",
        "gpt_neox",
        {"intermediate_size": 192, **rope(partial_rotary_factor=0.5)},
        rewrite=published(rotary_emb_base=500, rotary_pct=0.5),
    ),
    Tiny(
        "gpt_neox-serial",
        "gpt_neox",
        {
            "intermediate_size": 192,
            "hidden_act": "gelu_fast",
            "use_parallel_residual": False,
            **rope(partial_rotary_factor=0.5),
        },
        rewrite=published(rotary_emb_base=500, rotary_pct=0.5),
    ),
    Tiny("gptj", "gptj", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128, "rotary_dim": 8}),
    Tiny(
        "granitemoe",
        "granitemoe",
        {
            **EXPERTS,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.4,
            **rope(),
        },
    ),
    Tiny("helium", "helium", {"head_dim": 12, "attention_bias": True, "mlp_bias": True, **rope()}),
    Tiny("hunyuan_v1_dense", "hunyuan_v1_dense", {"head_dim": 16, **rope()}),
    Tiny("internlm3", "internlm3", {"head_dim": 12, **rope()}),
    Tiny("iquestcoder", "iquestcoder", {"head_dim": 16, **rope()}),
    Tiny(
        "mellum",
        "mellum",
        {
            **WINDOWS,
            **EXPERTS,
            "head_dim": 16,
            "norm_topk_prob": True,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            **by_kind(rope(), rope(rope_theta=100.0)),
        },
    ),
    Tiny(
        "minicpm3",
        "minicpm3",
        {
            **MHA,
            **LATENT,
            "v_head_dim": 12,
            "head_dim": 8,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 24,
            "tie_word_embeddings": False,
            "original_max_position_embeddings": 64,
            **rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.0, 2.0, 3.5, 4.0],
                original_max_position_embeddings=64,
            ),
        },
        context=64,
    ),
    Tiny(
        "minicpm3-long",
        "minicpm3",
        {
            **MHA,
            **LATENT,
            "v_head_dim": 12,
            "head_dim": 8,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 24,
            "tie_word_embeddings": False,
            "original_max_position_embeddings": 64,
            **rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.0, 2.0, 3.5, 4.0],
                original_max_position_embeddings=64,
            ),
        },
        length=100,
    ),
    Tiny(
        "minimax_m2",
        "minimax_m2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, **rope(partial_rotary_factor=0.5)},
        rewrite=published(shared_intermediate_size=0, rotary_dim=8),
    ),
    Tiny("nemotron", "nemotron", {"head_dim": 12, "norm_eps": 1e-5, **rope(partial_rotary_factor=0.5)}),
    Tiny(
        "olmo3",
        "olmo3",
        {**WINDOWS, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], **by_kind(YARN, rope())},
    ),
    Tiny("olmoe", "olmoe", {**EXPERTS, "intermediate_size": 40, "norm_topk_prob": True, **rope()}),
    Tiny("phi", "phi", {"partial_rotary_factor": 0.5, **rope(partial_rotary_factor=0.5)}),
    Tiny(
        "phimoe",
        "phimoe",
        {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "sliding_window": None, **rope()},
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
        rewrite=_flat,
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
    Tiny("seed_oss", "seed_oss", {"head_dim": 12, "attention_out_bias": False, "mlp_bias": False, **rope()}),
    Tiny(
        "solar_open",
        "solar_open",
        {**ROUTED, "head_dim": 16, "n_shared_experts": 1, **rope()},
        rewrite=published(first_k_dense_replace=0, partial_rotary_factor=1.0),
    ),
    Tiny("stablelm", "stablelm", {"use_qkv_bias": True, "hidden_size": 64, **rope(partial_rotary_factor=0.25)}),
    Tiny(
        "stablelm-parallel",
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, **rope(partial_rotary_factor=0.5)},
    ),
    Tiny("starcoder2", "starcoder2", {"sliding_window": None, "use_bias": True, "tie_word_embeddings": True, **rope()}),
    Tiny(
        "starcoder2-window",
        "starcoder2",
        {"sliding_window": 7, "hidden_act": "gelu", "use_bias": True, "tie_word_embeddings": False, **rope()},
    ),
    Tiny(
        "phimoe-window",
        "phimoe",
        {"num_local_experts": 4, "sliding_window": 7, "attention_bias": True, "lm_head_bias": True, **rope()},
    ),
    Tiny(
        "laguna",
        "laguna",
        {
            **EXPERTS,
            **WINDOWS,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
            "head_dim": 16,
            "shared_expert_intermediate_size": 24,
            "num_attention_heads_per_layer": [4, 4, 4, 4],
        },
    ),
    Twin(
        "mistral3-ministral3",
        "mistral3",
        {"head_dim": 16, "rope_parameters": {**YARN["rope_parameters"], "llama_4_scaling_beta": 0.5}},
        text_type="ministral3",
        parts={"vision_config": PIXTRAL},
    ),
    Twin("llava-llama", "llava", rope(), text_type="llama", parts={"vision_config": PIXTRAL}),
    Twin("llava", "llava", {"head_dim": 16, **rope()}, text_type="mistral", parts={"vision_config": PIXTRAL}),
    Tiny(
        "kimi_k2",
        "deepseek_v3",
        {**MHA, **LATENT, **ROUTED, "n_group": 1, "topk_group": 1, **YARN},
        rewrite=as_type("kimi_k2"),
    ),
    Tiny(
        "joyai_llm_flash",
        "deepseek_v3",
        {**MHA, **LATENT, **ROUTED, "n_group": 1, "topk_group": 1, **rope()},
        rewrite=as_type("joyai_llm_flash"),
    ),
]
TWINS = NEW
