"""Loads a model with mlx-lm. No code of a checkpoint is ever run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config, load_model

from ...engine.errors import ModelRefused, SettingRefused
from ...engine.modelfiles import ModelFiles
from ...engine.multimodal import TIE
from ...engine.options import LoadOptions
from ...engine.tensorfiles import StoredTensor
from . import families
from .adapter import Forward, probe_layers
from .cache import LayerShape
from .config_keys import ConfigKeys

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
BITS = {"int8": 8, "int4": 4}
GROUP = 64  # number of weights that share a scale, as in the checkpoints of mlx-community


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights in memory."""

    model: nn.Module
    forward: Forward
    shapes: list[LayerShape]  # one for each layer with a cache
    quant: str  # format of quantised weights, for display
    bytes: int  # bytes of all weights
    token_bytes: int  # bytes of the weights that one token reads; 0: depends on the token


def load(files: ModelFiles, options: LoadOptions) -> Loaded:
    """Load, verify and quantise a model. Raises ModelRefused or SettingRefused."""
    try:
        model, config = _load(files, options.context or files.config.max_positions)
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(
            f"{files.name} cannot be loaded by mlx-lm: its class of {files.config.model_type:.50} fails with this "
            f"config.json ({type(error).__name__}: {error!s:.200})",
            "choose another backend, or another release of mlx-lm",
        ) from error
    except (ValueError, RuntimeError, OSError) as error:
        raise ModelRefused(f"{files.name} cannot be loaded by mlx-lm: {error}") from error
    except (ImportError, SystemExit) as error:  # a module of mlx-lm exits if a package that it needs is missing
        raise ModelRefused(
            f"{files.name} cannot be loaded by mlx-lm: its architecture needs another package"
        ) from error
    quant = _format(config)
    if options.dtype != "auto":
        model.set_dtype(DTYPES[options.dtype])  # quantised weights keep their dtype
    if options.quant != "none":
        _quantise(model, files, options, quant)
        quant = options.quant
    mx.eval(model.parameters())
    forward = Forward(model)
    try:
        layers = probe_layers(model, forward)
    except ModelRefused as error:
        raise ModelRefused(f"{files.name} ({files.config.model_type}): {error}", error.hint) from error
    shapes = [
        LayerShape(cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3], cache.keys.dtype, cache.window)
        for cache in layers
    ]
    sizes = {path: weight.nbytes for path, weight in _weights(model)}
    return Loaded(model, forward, shapes, quant, sum(sizes.values()), _token_bytes(model, sizes))


def expected_bytes(tensors: Iterable[StoredTensor], options: LoadOptions) -> int:
    """Estimated bytes of stored tensors after `load`."""
    if options.quant not in BITS:
        return sum(tensor.num_bytes for tensor in tensors)
    value_bits = BITS[options.quant] + 32 / GROUP  # each group has a scale and a bias of 16 bits
    total = 0.0
    for tensor in tensors:
        is_quantised = len(tensor.shape) == 2 and tensor.shape[1] % GROUP == 0
        total += math.prod(tensor.shape) * value_bits / 8 if is_quantised else tensor.num_bytes
    return round(total)


def _load(files: ModelFiles, context: int) -> tuple[nn.Module, dict[str, Any]]:
    """(a verified model whose weights are still lazy, its config.json as mlx-lm changed it)."""
    values = load_config(files.path)
    if values.get("model_file") is not None:
        raise ModelRefused(
            f"{files.name} contains code ({values['model_file']!s:.50} in config.json), which is never run",
            "use a model of an architecture that mlx-lm has",
        )
    if families.describes(files.config):
        model, config = load_model(files.path, lazy=True, **families.load_arguments(files.config, context))
        families.verify(model, files.config)
    else:
        keys = ConfigKeys(values)
        arguments = keys.arguments()
        if files.config.multimodal:  # the class reads the field in text_config, which transformers ignores
            arguments["text_config"][TIE] = files.config.tie_embeddings
        model, config = load_model(files.path, lazy=True, model_config=arguments)
        keys.verify(model, context)
    return model, config


def _weights(model: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())  # type: ignore[return-value]


def _token_bytes(model: nn.Module, sizes: Mapping[str, int]) -> int:
    if any(weight.ndim > 2 for _, weight in _weights(model)):  # experts: a token reads only some of them
        return 0
    tied = not hasattr(model, "lm_head")  # a tied head reads the whole embedding table
    return sum(size for path, size in sizes.items() if tied or "embed_tokens" not in path)


def _format(config: Mapping[str, Any]) -> str:
    """The format of a quantised checkpoint, for display. `config` is mlx-lm's: it has converted the tables of other
    libraries to `quantization`."""
    table = config.get("quantization")
    if not table:
        return ""
    mode = table.get("mode", "affine")
    return f"mlx {table['bits']}-bit" if mode == "affine" else f"mlx {mode}"


def _quantise(model: nn.Module, files: ModelFiles, options: LoadOptions, stored_format: str) -> None:
    if options.quant not in BITS:
        raise SettingRefused(
            f"quant {options.quant} is not supported by mlx", f"choose one of {', '.join(BITS)}", setting="quant"
        )
    if stored_format:
        raise SettingRefused(
            f"{files.name} is quantised already ({stored_format})", "leave quant at none", setting="quant"
        )
    nn.quantize(model, GROUP, BITS[options.quant], class_predicate=_fits_quantisation)


def _fits_quantisation(_path: str, module: nn.Module) -> bool:
    """Whether a module is a projection or an embedding whose input features divide into groups."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0
