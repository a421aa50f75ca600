"""Builds mlx-lm's models of the families that ModelConfig describes.

mlx-lm's classes read the keys of transformers 4, and ignore some values: rare windows, biases and activations. So
`build` changes a model before its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.nn as nn
from mlx_lm.utils import _get_classes

from ...engine.errors import ModelRefused
from ...engine.files.model_config import ModelConfig
from .activations import GATED
from .adapter import Gated, Head, Layers, mix
from .ropes import Frequencies, NoRotation, rotation

# config.json -> (class of the model, class of its arguments)
Classes: TypeAlias = Callable[[dict[str, Any]], tuple[Any, Any]]


def arguments(config: ModelConfig) -> dict[str, Any]:
    """Keys of config.json for mlx-lm's classes. They have the values of ModelConfig; the parts that `build` replaces
    have neutral values."""
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "query_pre_attn_scalar": config.attention_scale**-2,
        "rope_theta": 10_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_traditional": False,
        "rope_scaling": None,
        "rope_parameters": None,
        "partial_rotary_factor": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
        "layer_types": None,
        "sliding_window": None,
        "sliding_window_pattern": 1,
    }


def classes(target: ModelConfig, context: int) -> Classes:
    """The function that gives mlx-lm's load_model the class of the model and that of its arguments."""

    def of(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, arguments_class = _get_classes(config)
        return lambda model_args: build(model_class(model_args), target, context), arguments_class

    return of


def build(model: nn.Module, config: ModelConfig, context: int) -> nn.Module:
    """Change a model before its weights are loaded. Raises ModelRefused if mlx-lm's class lacks an attribute that this
    function replaces."""
    for index, kind in enumerate(config.layer_kinds):
        layer = model.layers[index]
        attention = layer.self_attn
        has_rope = not config.rope_layers or config.rope_layers[index]
        rope = rotation(config.ropes[kind], context) if has_rope else NoRotation()
        _replace(attention, "rope", rope, config)
        _replace(attention, "scale", config.attention_scale, config)
        _replace(attention, "n_heads", config.num_heads, config)
        _replace(attention, "n_kv_heads", config.num_kv_heads, config)
        attention.head_dim = config.head_dim
        for name, projection in _projections(config).items():
            part = attention if name in attention else layer.mlp
            if name in part:
                setattr(part, name, nn.Linear(*projection))
        mix(layer.mlp, Gated, activation=GATED[config.activation])
    scale = config.hidden_size**0.5 if config.model_type == "gemma3_text" else 1.0
    first = {kind: config.layer_kinds.index(kind) for kind in config.ropes}
    mix(model.model, Layers, embedding_scale=scale, first_of_kind=[first[kind] for kind in config.layer_kinds])
    mix(model, Head, config=config)
    return model


def _replace(part: nn.Module, name: str, value: Any, config: ModelConfig) -> None:
    """Set an attribute of a module. Raises ModelRefused if the module has no such attribute: this release of mlx-lm
    would ignore the value."""
    if not hasattr(part, name):
        raise _differs(config, f"{name} of {type(part).__name__}", "absent", "present")
    setattr(part, name, value)


def _projections(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """Name of a projection in mlx-lm -> (input features, output features, whether it has a bias). qkv_proj and
    gate_up_proj are phi3's merged projections."""
    hidden = config.hidden_size
    inner = config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return {
        "q_proj": (hidden, queries, config.qkv_bias),
        "k_proj": (hidden, keys, config.qkv_bias),
        "v_proj": (hidden, keys, config.qkv_bias),
        "qkv_proj": (hidden, queries + 2 * keys, config.qkv_bias),
        "o_proj": (queries, hidden, config.output_bias),
        "gate_proj": (hidden, inner, config.mlp_bias),
        "up_proj": (hidden, inner, config.mlp_bias),
        "gate_up_proj": (hidden, 2 * inner, config.mlp_bias),
        "down_proj": (inner, hidden, config.mlp_bias),
    }


def set_context(model: nn.Module, context: int) -> None:
    """Set the LongRoPE factors of a loaded model for a context limit of `context` tokens. The limit depends on the size
    of the KV cache, which is known only after the model is loaded."""
    for layer in model.layers:
        rope = layer.self_attn.rope
        if isinstance(rope, Frequencies):
            rope.set_context(context)


def verify(model: nn.Module, config: ModelConfig) -> None:
    """Compare a loaded model with the values of ModelConfig that `build` does not set. Raises ModelRefused."""
    if len(model.layers) != config.num_layers:
        raise _differs(config, "num_hidden_layers", len(model.layers), config.num_layers)
    for path, part in model.named_modules():
        if getattr(part, "eps", config.norm_eps) != config.norm_eps:
            raise _differs(config, f"rms_norm_eps of {path}", part.eps, config.norm_eps)
    owner = model if "tie_word_embeddings" in vars(model) else model.args
    if ("lm_head" in model) == config.tie_embeddings or owner.tie_word_embeddings != config.tie_embeddings:
        raise _differs(config, "tie_word_embeddings", not config.tie_embeddings, config.tie_embeddings)


def _differs(config: ModelConfig, name: str, value: Any, expected: Any) -> ModelRefused:
    return ModelRefused(
        f"mlx-lm does not compute {config.model_type} as config.json says: {name} is {value!s:.100}, "
        f"not {expected!s:.100}",
        "choose another backend, or another release of mlx-lm",
    )
