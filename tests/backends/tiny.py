"""Tiny models of every architecture with random weights, saved as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCAB = 131
HIDDEN = 48

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}
_VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
}

Rewrite = Callable[[dict[str, Any]], None]


def old_spelling(config: dict[str, Any]) -> None:
    """The rope fields in the spelling of transformers 4."""
    ropes = config.pop("rope_parameters")
    scaling = ropes.get("full_attention", ropes)
    config["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        config["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    kind, name = scaling.pop("rope_type"), "type" if scaling is ropes else "rope_type"
    config["rope_scaling"] = None if kind == "default" else {name: kind, **scaling}
    config["torch_dtype"] = config.pop("dtype")
    if scaling is not ropes:
        config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        config.pop("layer_types")
        config["sliding_window_pattern"] = 2


def as_type(model_type: str) -> Rewrite:
    """Another model_type for the same computation."""
    return lambda config: config.update(model_type=model_type)


def _published_phi3(config: dict[str, Any]) -> None:
    """Microsoft's spelling of Phi-3: fields of all scalings beside rope_scaling, not in it."""
    scaling = config.pop("rope_parameters")
    config["rope_theta"], config["partial_rotary_factor"] = scaling["rope_theta"], scaling["partial_rotary_factor"]
    config["rope_scaling"] = {
        "type": "longrope",
        "short_factor": scaling["short_factor"],
        "long_factor": scaling["long_factor"],
    }


def _no_defaults(config: dict[str, Any]) -> None:
    """Remove fields that most published files do not have."""
    for key in ("head_dim", "attention_bias", "mlp_bias", "pretraining_tp", "rope_parameters"):
        config.pop(key, None)


@dataclass(frozen=True)
class Tiny:
    """An architecture and the settings of one of its tiny models."""

    label: str
    model_type: str
    more: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    rewrite: Rewrite | None = None  # changes config.json after the save
    context: int | None = None  # LoadOptions.context
    length: int = 45  # tokens of a prompt that uses the special features
    shard_size: str = "5GB"
    multimodal: str = ""  # model_type of a multimodal model that has this text model

    def __str__(self) -> str:
        return self.label

    @property
    def auto(self) -> Any:
        """The class of transformers that builds and loads the model."""
        return AutoModelForImageTextToText if self.multimodal else AutoModelForCausalLM

    def config(self) -> PreTrainedConfig:
        config = AutoConfig.for_model(self.model_type, **{**_SHAPE, **deepcopy(dict(self.more))})
        if not self.multimodal:
            return config
        tied = config.tie_word_embeddings
        vision = _QWEN_VISION if self.multimodal.startswith("qwen") else _VISION
        parts = {"text_config": config.to_dict(), "vision_config": vision}
        return AutoConfig.for_model(self.multimodal, **parts, tie_word_embeddings=tied)

    def _adds_one(self, name: str) -> bool:
        """Whether the model adds 1 to this vector."""
        if self.model_type.startswith(("qwen3_next", "qwen3_5")):
            return name.endswith("norm.weight") and "linear_attn" not in name
        return self.model_type.startswith("gemma") and "gemma4" not in self.model_type

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Save the model to `folder`. Returns the model of transformers."""
        generator = torch.Generator().manual_seed(11)
        model = self.auto.from_config(self.config(), dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.data = noise * 1.5 / parameter.shape[-1] ** 0.5
            elif name.endswith("bias") or self._adds_one(name):
                parameter.data = noise * 0.2
            else:
                parameter.data = 1.0 + noise * 0.2
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.data = torch.randn(buffer.shape, generator=generator) * 0.2
        model.tie_weights()
        model.to(dtype).save_pretrained(folder, max_shard_size=self.shard_size)
        if self.rewrite:
            file = folder / "config.json"
            values = json.loads(file.read_text())
            self.rewrite(values)
            file.write_text(json.dumps(values))
        return model


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **more}}


_LLAMA3 = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32)
_LONG = {
    "original_max_position_embeddings": 64,
    **_rope(
        "longrope",
        partial_rotary_factor=0.5,
        short_factor=[1.0, 1.1, 1.2],
        long_factor=[1.0, 2.0, 3.5],
        original_max_position_embeddings=64,
    ),
}
_GEMMA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 20,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.3,
    "rms_norm_eps": 0.03,
}

_SMOLLM = {"num_key_value_heads": 2, "no_rope_layer_interval": 2}

_MINISTRAL = _rope(
    "yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5
)

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_GLM_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_DEEPSEEK_YARN = _rope(
    "yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.1, truncate=False
)

# Sizes for which one kernel of the CPU computes all experts.
_PANELS = {"hidden_size": 64, "intermediate_size": 32}

# Odd sizes of Gated DeltaNet: three value heads for each key head, keys and values of different lengths. With a small
# eps its norm multiplies the roundings of tiny results, and transformers differs from float64 by more than the bound.
_DELTA = {
    "rms_norm_eps": 0.05,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "norm_eps": 0.01,
    "tie_word_embeddings": True,
}


def _published_lfm2(config: dict[str, Any]) -> None:
    """Liquid's spelling of LFM2."""
    kinds = config.pop("layer_types")
    config["full_attn_idxs"] = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    config["block_ff_dim"] = config.pop("intermediate_size")
    config["tie_embedding"] = config.pop("tie_word_embeddings")


_DELTA_EXPERTS = {**_EXPERTS, "shared_expert_intermediate_size": 56}

# The labels of models with recurrent states begin so.
HYBRIDS = ("bamba", "granitemoehybrid-mamba", "lfm2", "qwen3_5", "qwen3_next")

_MAMBA = {
    "rms_norm_eps": 0.05,
    "num_hidden_layers": 4,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
}
_MAMBA_KINDS = {"layer_types": ["mamba", "attention", "mamba", "mamba"]}

TINIES = [
    Tiny("bamba", "bamba", {**_MAMBA, "attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True}),
    Tiny(
        "granitemoehybrid-mamba",
        "granitemoehybrid",
        {**_MAMBA, **_MAMBA_KINDS, **_GRANITE, "num_local_experts": 0, "mamba_proj_bias": True, "rms_norm_eps": 0.05},
        rewrite=lambda config: config.update(_MAMBA_KINDS),
    ),
    Tiny(
        "granitemoehybrid-mamba-experts",
        "granitemoehybrid",
        {
            **_MAMBA,
            **_MAMBA_KINDS,
            **_GRANITE,
            "num_local_experts": 4,
            "mamba_n_heads": 4,
            "mamba_n_groups": 1,
            "mamba_d_head": "auto",
            "mamba_conv_bias": False,
            "position_embedding_type": "rope",
            "rms_norm_eps": 0.05,
        },
    ),
    Tiny("deepseek_v2", "deepseek_v2", {"q_lora_rank": None, "mlp_bias": True, **_LATENT, **_GLM_EXPERTS}),
    Tiny("deepseek_v2-lite", "deepseek_v2", {"q_lora_rank": None, **_LATENT, **_GLM_EXPERTS, **_DEEPSEEK_YARN}),
    Tiny(
        "deepseek_v2-groups",
        "deepseek_v2",
        {
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "attention_bias": True,
            **_LATENT,
            **_GLM_EXPERTS,
            **_DEEPSEEK_YARN,
        },
    ),
    Tiny(
        "deepseek_v3",
        "deepseek_v3",
        {"q_lora_rank": 20, "rms_norm_eps": 0.05, "n_group": 4, "topk_group": 2, **_LATENT, **_GLM_EXPERTS},
    ),
    Tiny(
        "deepseek_v3-yarn",
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            **_LATENT,
            **_GLM_EXPERTS,
            **_DEEPSEEK_YARN,
        },
    ),
    Tiny(
        "deepseek_v3-dense",
        "deepseek_v3",
        {"q_lora_rank": 20, "rope_interleave": False, "first_k_dense_replace": 3, **_LATENT},
    ),
    Tiny("lfm2", "lfm2", {**_LFM2, "block_auto_adjust_ff_dim": False}),
    Tiny(
        "lfm2-published",
        "lfm2",
        {**_LFM2, "conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 7, "block_ffn_dim_multiplier": 1.1},
        rewrite=_published_lfm2,
    ),
    Tiny("lfm2_moe", "lfm2_moe", {**_LFM2, **_EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5}),
    Tiny("llama", "llama"),
    Tiny("llama-published", "llama", rewrite=_no_defaults),
    Tiny("llama-tied", "llama", {"tie_word_embeddings": True}),
    Tiny("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    Tiny("llama-wide-heads", "llama", {"head_dim": 32, "num_key_value_heads": 1}),
    Tiny("llama-sharded", "llama", shard_size="40KB"),
    Tiny("llama-llama3", "llama", _LLAMA3),
    Tiny("llama-llama3-old", "llama", _LLAMA3, rewrite=old_spelling),
    Tiny("llama-linear", "llama", _rope("linear", factor=4.0)),
    Tiny("llama-yarn", "llama", _YARN),
    Tiny("llama-yarn-old", "llama", _YARN, rewrite=old_spelling),
    Tiny(
        "llama-yarn-mscale",
        "llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=0.7,
            mscale_all_dim=0.3,
            truncate=False,
            beta_fast=20.0,
        ),
    ),
    Tiny("mistral", "mistral", {"sliding_window": None, "head_dim": 16}),
    Tiny("mistral-window", "mistral", {"sliding_window": 7}),
    Tiny("qwen2", "qwen2"),
    Tiny("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
    Tiny("qwen2-window", "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    Tiny("qwen3", "qwen3", {"head_dim": 24}),
    Tiny("qwen3-tied-yarn", "qwen3", {"head_dim": 16, "tie_word_embeddings": True, **_YARN}),
    Tiny("qwen3-biases", "qwen3", {"head_dim": 16, "attention_bias": True}),
    Tiny("qwen3_moe", "qwen3_moe", {"head_dim": 24, "norm_topk_prob": True, **_EXPERTS}),
    Tiny("qwen3_moe-dense-layer", "qwen3_moe", {"head_dim": 16, "mlp_only_layers": [1], **_EXPERTS}),
    Tiny(
        "qwen3_moe-window",
        "qwen3_moe",
        {"head_dim": 16, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 7, **_EXPERTS},
    ),
    Tiny("qwen2_moe", "qwen2_moe", {"shared_expert_intermediate_size": 56, **_EXPERTS}),
    Tiny(
        "qwen2_moe-window",
        "qwen2_moe",
        {
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 6,
            **_EXPERTS,
        },
    ),
    Tiny("mixtral", "mixtral", {"num_local_experts": 5}),
    Tiny("mixtral-panels", "mixtral", {"num_local_experts": 5, **_PANELS}),
    Tiny("mixtral-window", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 7}),
    Tiny("glm4_moe", "glm4_moe", {"head_dim": 16, "use_qk_norm": True, "routed_scaling_factor": 1.5, **_GLM_EXPERTS}),
    Tiny(
        "glm4_moe-groups",
        "glm4_moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_group": 4,
            "topk_group": 2,
            **_GLM_EXPERTS,
        },
    ),
    Tiny("gpt_oss", "gpt_oss", {"head_dim": 16, "sliding_window": 8, "num_local_experts": 6, "num_experts_per_tok": 3}),
    Tiny(
        "gpt_oss-panels",
        "gpt_oss",
        {"head_dim": 16, "sliding_window": 8, "num_local_experts": 6, "num_experts_per_tok": 3, **_PANELS},
    ),
    Tiny(
        "gpt_oss-yarn",
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
        },
    ),
    Tiny(
        "gemma2",
        "gemma2",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 20,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    Tiny(
        "gemma2-uncapped",
        "gemma2",
        {"head_dim": 12, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 9},
    ),
    Tiny("gemma3", "gemma3_text", _GEMMA),
    Tiny("gemma3-old", "gemma3_text", _GEMMA, rewrite=old_spelling),
    Tiny("gemma3-capped", "gemma3_text", {**_GEMMA, "final_logit_softcapping": 3.0, "tie_word_embeddings": False}),
    Tiny("glm4", "glm4", {"head_dim": 16}),
    Tiny(
        "glm4-whole-heads",
        "glm4",
        {
            "head_dim": 20,
            "tie_word_embeddings": True,
            "attention_bias": False,
            **_rope("default", partial_rotary_factor=1.0),
        },
    ),
    Tiny("glm4-yarn", "glm4", {"head_dim": 24, **_YARN}),
    Tiny("granite", "granite", _GRANITE),
    Tiny(
        "granite-biases",
        "granite",
        {**_GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, **_LLAMA3},
    ),
    Tiny("ministral3", "ministral3", {"head_dim": 16, **_MINISTRAL}),
    Tiny("ministral3-window", "ministral3", {"head_dim": 12, "sliding_window": 9, **_MINISTRAL}),
    Tiny(
        "ministral3-default-rope",
        "ministral3",
        {"head_dim": 12, **_rope("default", original_max_position_embeddings=5, llama_4_scaling_beta=0.6)},
    ),
    Tiny("mistral3", "ministral3", {"head_dim": 16, **_MINISTRAL}, multimodal="mistral3"),
    Tiny("mistral3-tied", "ministral3", {"tie_word_embeddings": True, **_MINISTRAL}, multimodal="mistral3"),
    Tiny("mistral3-mistral", "mistral", {"sliding_window": None}, multimodal="mistral3"),
    Tiny("olmo2", "olmo2"),
    Tiny("olmo2-biases", "olmo2", {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 1}),
    Tiny("olmo2-tied-yarn", "olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4, **_YARN}),
    Tiny("qwen3_next", "qwen3_next", {**_DELTA, **_DELTA_EXPERTS}),
    Tiny(
        "qwen3_next-published",
        "qwen3_next",
        {
            "num_hidden_layers": 5,
            "rms_norm_eps": 0.05,
            "head_dim": 24,
            "linear_conv_kernel_dim": 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
            **_DELTA_EXPERTS,
        },
        rewrite=lambda config: config.pop("layer_types"),
    ),
    Tiny("qwen3_5_text", "qwen3_5_text", {**_DELTA, "tie_word_embeddings": True}),
    Tiny("qwen3_5", "qwen3_5_text", _DELTA, multimodal="qwen3_5"),
    Tiny("qwen3_5_moe_text", "qwen3_5_moe_text", {**_DELTA, **_DELTA_EXPERTS}),
    Tiny("qwen3_5_moe", "qwen3_5_moe_text", {**_DELTA, **_DELTA_EXPERTS}, multimodal="qwen3_5_moe"),
    Tiny("smollm3", "smollm3", _SMOLLM),
    Tiny("smollm3-list", "smollm3", {"no_rope_layers": [0, 1, 1], "head_dim": 16, **_YARN}),
    Tiny(
        "smollm3-window",
        "smollm3",
        {**_SMOLLM, "use_sliding_window": True, "sliding_window": 7, "attention_bias": True, "mlp_bias": True},
    ),
    Tiny("smollm3-no-ropes", "smollm3", {"no_rope_layers": [0, 0, 0], "tie_word_embeddings": True}),
    Tiny("phi3", "phi3"),
    Tiny("phi3-window", "phi3", {"sliding_window": 9}),
    Tiny("phi3-longrope-short", "phi3", _LONG, context=64),
    Tiny("phi3-longrope-published", "phi3", _LONG, rewrite=_published_phi3, context=64),
    Tiny("phi3-longrope-long", "phi3", _LONG, context=128, length=100),
]
