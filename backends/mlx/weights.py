"""The stored weights on their way into a class of mlx-lm: fp8 numbers are decoded, and no tensor vanishes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...engine.errors import ModelRefused
from ...engine.files.families import FAMILIES
from ...engine.files.model_config import ModelConfig
from ...engine.files.quantization import Quantization
from ...engine.files.tensor_names import decoder_tensors, names_of_language_model
from .adapter import mix

Weights = dict[str, mx.array]

_SCALES = ("_scale_inv", "_scale")  # ends of the names of scales; both are factors
_ACTIVATIONS = (".activation_scale", ".input_scale")  # of quantised activations; MLX computes with floats
# Tensors that no class needs: tables that are computed, and the parts of a multimodal model beside its text model.
_UNUSED = re.compile(
    r"rotary_emb\.|\.(attn|attention)\.(masked_)?bias$|\.(input|output)_(max|min)$|(^|\.)mtp|"
    r"^(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio)\."
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.*)")
_KEYS_AND_VALUES = re.compile(r"self_attn\.(k_proj|v_proj|k_norm)\.")


class _Stored:
    """Mixin for a model of mlx-lm."""

    config: ModelConfig
    text: Mapping[str, Any]
    decode: Callable[[Weights], Weights]

    def sanitize(self: Any, weights: Weights) -> Weights:
        """The weights to load. Raises ModelRefused if the class of mlx-lm drops a tensor that counts."""
        if not weights:  # only config.json is known
            return {}
        if self.config.model_type in FAMILIES and not self.config.multimodal:
            weights = decoder_tensors(names_of_language_model(weights), self.config)
        weights = self.decode(weights)
        sanitize = getattr(super(), "sanitize", None)
        loaded = dict(weights) if sanitize is None else sanitize(dict(weights))
        if self.text.get("tie_word_embeddings") and "lm_head" not in self:
            loaded.pop("lm_head.weight", None)  # equal to the embedding: loading.py compares them
        _verify_complete(*(_without_unused(self.text, some) for some in (weights, loaded)))
        return _with_positive_corrections(loaded) if (self.text.get("n_group") or 1) > 1 else loaded


def watch_weights(
    model: nn.Module, config: ModelConfig, text: Mapping[str, Any], stored: Quantization | None, dtype: mx.Dtype
) -> nn.Module:
    """The model, which decodes and checks its weights while it is loaded. `text`: the fields of config.json of the text
    model. `dtype`: of decoded weights."""
    decode: Callable[[Weights], Weights] = dict
    if stored is not None and stored.format == "fp8":
        decode = partial(_decode, stored, dtype)
    elif dtype == mx.float32:
        decode = _with_wide_scales
    mix(model, _Stored, config=config, text=text, decode=decode)
    return model


def _with_wide_scales(weights: Weights) -> Weights:
    """mlx-lm gives all weights of an AWQ checkpoint the type of its scales, and rounds zero points to it."""
    return {name: x.astype(mx.float32) if _has_awq(name, weights) else x for name, x in weights.items()}


def _has_awq(name: str, weights: Weights) -> bool:
    return name.endswith(".scales") and name.removesuffix("scales") + "qweight" in weights


def _decode(stored: Quantization, dtype: mx.Dtype, weights: Weights) -> Weights:
    decoded = {name: x for name, x in weights.items() if not name.endswith(_ACTIVATIONS)}
    for name, numbers in weights.items():
        if numbers.dtype != mx.uint8:  # the type in which MLX reads F8_E4M3
            continue
        scale = next((decoded.pop(name + end) for end in _SCALES if name + end in decoded), None)
        if scale is None:
            raise ModelRefused(f"the fp8 tensor {name:.100} has no scale")
        factors = _spread(scale.astype(mx.float32), numbers.shape, stored)
        decoded[name] = (mx.from_fp8(numbers, mx.float32) * factors).astype(dtype)
    return decoded


def _spread(scale: mx.array, shape: tuple[int, ...], stored: Quantization) -> mx.array:
    """The scales in a shape that broadcasts to the weight's."""
    if scale.size == 1:
        return scale.reshape(1)
    if not stored.block:
        return scale if scale.ndim == len(shape) else scale[..., None]
    scale = mx.repeat(scale, stored.block, -2)[..., : shape[-2], :]
    return mx.repeat(scale, stored.group, -1)[..., : shape[-1]]


def _with_positive_corrections(weights: Weights) -> Weights:
    """mlx-lm sets the scores of groups that a router excludes to 0, transformers to -inf. An equal shift of all
    corrections changes no order, and makes all other scores positive."""
    shifted = {}
    for name, x in weights.items():
        if name.endswith("e_score_correction_bias"):
            wide = x.astype(mx.float32)
            shifted[name] = wide - mx.minimum(wide.min(), 0.0)
    return weights | shifted


def _without_unused(text: Mapping[str, Any], weights: Weights) -> Weights:
    return {name: x for name, x in weights.items() if not _is_unused(text, name)}


def _is_unused(text: Mapping[str, Any], name: str) -> bool:
    """Whether transformers also ignores this stored tensor."""
    if _UNUSED.search(name):
        return True
    if "lm_head." in name:
        return bool(text.get("tie_word_embeddings"))
    layer = _LAYER.search(name)
    layers = text.get("num_hidden_layers")
    if layer is None or not isinstance(layers, int):
        return False
    shared = text.get("num_kv_shared_layers") or 0
    return int(layer[1]) >= layers or (int(layer[1]) >= layers - shared and bool(_KEYS_AND_VALUES.match(layer[2])))


def _verify_complete(stored: Weights, loaded: Weights) -> None:
    """Classes rename, join, split and repack tensors, so only the number of values, or of bytes, stays the same."""
    if any(_total(stored, what) <= _total(loaded, what) for what in ("size", "nbytes")):
        return
    ends = {_end(name) for name in loaded}
    lost = [name for name in stored if name not in loaded]
    name = next((name for name in lost if _end(name) not in ends), lost[0])
    raise ModelRefused(f"mlx-lm drops stored tensors, such as {name:.100}")


def _total(weights: Weights, what: str) -> int:
    return sum(getattr(x, what) for x in weights.values())


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])
