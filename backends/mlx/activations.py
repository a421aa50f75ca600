"""The activation of the MLPs. Most classes of mlx-lm compute one activation, and ignore its name in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from ...engine.errors import ModelRefused
from ...engine.files.model_config import ACTIVATIONS
from .adapter import UNGATED, Gated, Ungated, mix

KEYS = ("hidden_act", "hidden_activation", "activation_function")  # of config.json
# model_type -> the activation of its class in mlx-lm, if it is not silu
_OF_CLASS = {
    **dict.fromkeys(("gemma3_text", "gemma4_text", "gpt2", "gptj", "phi"), "gelu_tanh"),
    "apertus": "xielu",
    "nemotron": "relu2",
}
_SET = frozenset({"gemma", "gpt_neox", "starcoder2"})  # their activation is set here


@partial(mx.compile, shapeless=True)
def _geglu_tanh(gate: mx.array, x: mx.array) -> mx.array:
    return nn.gelu_approx(gate) * x


@partial(mx.compile, shapeless=True)
def _geglu(gate: mx.array, x: mx.array) -> mx.array:
    return nn.gelu(gate) * x


GATED: Mapping[str, Callable[[mx.array, mx.array], mx.array]] = {
    "silu": swiglu,
    "gelu_tanh": _geglu_tanh,
    "gelu": _geglu,
}
_UNGATED: Mapping[str, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "gelu_tanh": nn.gelu_approx,
    "gelu": nn.gelu,
}


def set_activation(model: nn.Module, text: Mapping[str, Any]) -> None:
    """Set the activation that config.json names, or verify it. `text`: the fields of the text model. Raises
    ModelRefused for an activation that the class does not compute."""
    model_type = text.get("model_type", "")
    name = next((text[key] for key in KEYS if text.get(key)), "silu")
    kind = ACTIVATIONS.get(name, name)
    is_set = model_type in _SET and kind in GATED
    if is_set:
        for part in model.modules():
            if "gate_proj" in part and "down_proj" in part:
                mix(part, Gated, activation=GATED[kind])
            elif any(first in part for first, _ in UNGATED):
                mix(part, Ungated, activation=_UNGATED[kind])
    elif kind != _OF_CLASS.get(model_type, "silu"):
        raise ModelRefused(
            f"mlx-lm computes {model_type} differently from transformers: config.json has the activation {name!s:.50}, "
            f"but its class computes {_OF_CLASS.get(model_type, 'silu')}"
        )
