"""Writes tiny models of transformers as GGUF files, with the names of the gguf library, in float32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig

from .gguf_models import writer

# model_type of transformers -> (architecture of GGUF, whether its heads have their rows in pairs)
ARCHITECTURES: Mapping[str, tuple[str, bool]] = {
    "glm4": ("glm4", False),
    "mixtral": ("llama", True),
    "gemma": ("gemma", False),
    "gemma2": ("gemma2", False),
    "gemma3_text": ("gemma3", False),
    "granite": ("granite", True),
    "llama": ("llama", True),
    "ministral3": ("mistral3", True),
    "mistral": ("llama", True),
    "olmo2": ("olmo2", False),
    "phi3": ("phi3", False),
    "qwen2": ("qwen2", False),
    "qwen2_moe": ("qwen2moe", False),
    "qwen3": ("qwen3", False),
    "qwen3_moe": ("qwen3moe", False),
    "smollm3": ("smollm3", True),
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def write_twin(folder: Path, file: Path) -> Path:
    """The model of `folder`, which transformers has saved. It has no vocabulary: tests use token ids."""
    config = AutoConfig.from_pretrained(folder)
    architecture, is_paired = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[_arch(architecture)], config.num_hidden_layers)
    with writer(file, architecture) as out:
        out.add_tokenizer_model("none")
        out.add_vocab_size(config.vocab_size)
        _add_shape(out, config)
        for name, values in _stacked(folder).items():
            if is_paired and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                values = _paired(values, heads)
            if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
                values = values + 1.0
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found, name
            out.add_tensor(found, np.ascontiguousarray(values))
    return file


def _arch(architecture: str) -> str:
    return next(kind.name for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _stacked(folder: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors, with one tensor for the experts of a layer."""
    tensors: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        expert = _EXPERT.fullmatch(name)
        if expert:
            experts.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = tensor.float().numpy()
        else:
            tensors[name] = tensor.float().numpy()
    for name, parts in experts.items():
        tensors[name] = np.stack([parts[index] for index in range(len(parts))])
    return tensors


def _paired(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of each head in the order 0, n, 1, n+1, … for a head of 2n rows."""
    dim = len(values) // heads
    order = [row for pair in zip(range(dim // 2), range(dim // 2, dim), strict=True) for row in pair]
    return np.concatenate([head[order] for head in np.split(values, heads)])


def _add_shape(out: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = config.rope_parameters
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_rope_dimension_count(int(head_dim * ropes.get("partial_rotary_factor", 1.0)))
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "gemma3_text":
        out.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        out.add_float32("gemma3.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
        out.add_sliding_window(config.sliding_window)
    else:
        out.add_rope_freq_base(ropes["rope_theta"])
    if config.model_type == "gemma2":
        out.add_sliding_window(config.sliding_window)
        out.add_attn_logit_softcapping(config.attn_logit_softcapping)
        out.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "granite":
        out.add_attention_scale(config.attention_multiplier)
        out.add_embedding_scale(config.embedding_multiplier)
        out.add_residual_scale(config.residual_multiplier)
        out.add_logit_scale(config.logits_scaling)
    if hasattr(config, "num_experts_per_tok"):
        out.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        out.add_expert_used_count(config.num_experts_per_tok)
        out.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if config.model_type == "qwen2_moe":
        out.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
