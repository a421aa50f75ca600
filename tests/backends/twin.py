"""Tiny models in transformers whose files have the layout of published files."""

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

from .tiny import VOCAB, Rewrite, Tiny

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


def published_gemma4(config: dict[str, Any]) -> None:
    del config["text_config"]["per_layer_config"]
    config["text_config"]["global_head_dim"] = 32


def flat(config: dict[str, Any]) -> None:
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
