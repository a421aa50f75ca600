"""Loading a model of mlx-lm from files that were looked at before. None of their code is ever run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import load_model

from ...engine.errors import ModelRefused, SettingRefused
from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from . import families, strangers
from .attention import Ragged, hook_attention
from .caches import LayerShape
from .experts import use_kernels
from .projections import linears, turn_weights
from .rotary import turns_late
from .trunk import Trunk

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
BITS = {"int8": 8, "int4": 4}
GROUP = 64  # inputs that share a scale, as mlx-community's checkpoints have it


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights in memory."""

    model: nn.Module
    trunk: Trunk
    shapes: list[LayerShape]  # one for each layer with a cache
    quant: str  # its weights' format where they are quantised, for people
    bytes: int  # of its weights
    token_bytes: int  # of those, what computing one token reads; 0: it depends on the token
    turns_late: bool  # its layers take rotary.LATER for an offset


def load(files: ModelFiles, budget: LoadOptions) -> Loaded:
    """Raises ModelRefused or SettingRefused."""
    _refuse_code(files)
    context = budget.context or files.config.max_positions
    try:
        model, config = load_model(files.path, lazy=True, **_how(files, context))
        if families.describes(files.config):
            families.verify(model, files.config, context)
        else:
            strangers.verify(model, config, context)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise ModelRefused(f"{files.name} cannot be loaded by mlx-lm: {error}") from error
    except (ImportError, SystemExit) as error:  # some of its modules leave where a package of theirs is missing
        raise ModelRefused(
            f"{files.name} cannot be loaded by mlx-lm: its architecture wants another package"
        ) from error
    quant = _format(config)
    if budget.dtype != "auto":
        model.set_dtype(DTYPES[budget.dtype])  # of everything that computes in floats; packed weights stay
    if budget.quant != "none":
        _quantise(model, files, budget, quant)
        quant = budget.quant
    mx.eval(model.parameters())
    use_kernels(model)
    windows = _windows(model, files)
    trunk = Trunk(model)
    hook_attention(model)
    sizes = {path: weight.nbytes for path, weight in _weights(model)}
    shapes, token_bytes = _shapes(model, trunk, windows, files), _token_bytes(model, sizes)
    late = turns_late(model, trunk, len(windows))
    turn_weights(model)  # after trials, which may break off in the middle of a layer
    _name_parts(model)
    return Loaded(model, trunk, shapes, quant, sum(sizes.values()), token_bytes, late)


def _name_parts(model: nn.Module) -> None:
    """Parts of a module as attributes beside its dict, where Python finds them without a call: a step of a small model
    asks for them some hundred times. Whoever replaces a part later does so by setattr and calls this again."""
    for module in model.modules():
        for name, part in module.items():
            if isinstance(part, nn.Module | list):
                object.__setattr__(module, name, part)


def _weights(model: nn.Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())  # type: ignore[return-value]


def _token_bytes(model: nn.Module, sizes: Mapping[str, int]) -> int:
    if any(weight.ndim > 2 for _, weight in _weights(model)):  # of experts, whom tokens choose
        return 0
    tied = not hasattr(model, "lm_head")  # then the head reads all of the embedding
    return sum(size for path, size in sizes.items() if tied or "embed_tokens" not in path)


def _format(config: Mapping[str, Any]) -> str:
    """Of weights that were quantised before, in words; mlx-lm notes there what it made of other formats."""
    table = config.get("quantization")
    if not table:
        return ""
    mode = table.get("mode", "affine")
    return f"mlx {table['bits']}-bit" if mode == "affine" else f"mlx {mode}"


def _how(files: ModelFiles, context: int) -> dict[str, Any]:
    """Arguments for load_model."""
    if families.describes(files.config):
        return families.loading(files.config, context)
    return {"model_config": strangers.arguments(_values(files))}


def _values(files: ModelFiles) -> dict[str, Any]:
    with (files.path / "config.json").open(encoding="utf-8") as file:
        values: dict[str, Any] = json.load(file)
        return values


def _refuse_code(files: ModelFiles) -> None:
    named = _values(files).get("model_file")
    if named is not None:
        raise ModelRefused(
            f"{files.name} asks to run code of its own ({named!s:.50} in config.json), which is never done",
            "use a model of an architecture that mlx-lm has",
        )


def _quantise(model: nn.Module, files: ModelFiles, budget: LoadOptions, quantised: str) -> None:
    if budget.quant not in BITS:
        raise SettingRefused(f"quant {budget.quant} is not for mlx", f"choose one of {', '.join(BITS)}")
    if quantised:
        raise SettingRefused(f"{files.name} is quantised already ({quantised})", "leave quant at none")
    fitting = {path for path, module in linears(model) if module.weight.shape[-1] % GROUP == 0}
    nn.quantize(model, GROUP, BITS[budget.quant], class_predicate=lambda path, _: path in fitting)


def _windows(model: nn.Module, files: ModelFiles) -> list[int]:
    """Of each layer's cache, as the model makes them. Raises ModelRefused for caches that are no keys and values."""
    caches = model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in model.layers]
    for cache in caches:
        if type(cache) not in (KVCache, RotatingKVCache) or getattr(cache, "keep", False):
            raise ModelRefused(
                f"{files.name}: its layers keep a {type(cache).__name__}, not plain keys and values: "
                "recurrent and compressed caches are not supported here yet",
                "choose a model of another architecture",
            )
    return [cache.max_size if isinstance(cache, RotatingKVCache) else 0 for cache in caches]


class _Sounding:
    """A cache that only learns what it would have to hold; nothing is computed.

    What it returns is for our attention: a model that looks at it has attention of its own.
    """

    offset = 0

    def __init__(self) -> None:
        self.seen: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Ragged, Ragged]:
        self.seen = keys, values
        return Ragged([keys]), Ragged([values])

    def make_mask(self, *args: Any, **kwargs: Any) -> Ragged:
        return Ragged([None])


def _shapes(model: nn.Module, trunk: Trunk, windows: list[int], files: ModelFiles) -> list[LayerShape]:
    caches = [_Sounding() for _ in windows]
    try:
        trunk.call(model, mx.zeros((1, 1), mx.int32), caches, 0)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ModelRefused(
            f"{files.name}: mlx-lm computes {files.config.model_type} with attention of its own, which does not take "
            f"our caches ({error})",
            "choose a model of another architecture",
        ) from error
    shapes = []
    for cache, window in zip(caches, windows, strict=True):
        if cache.seen is None:
            raise ModelRefused(f"{files.name}: a layer keeps no keys and values, which is not supported here yet")
        keys, values = cache.seen
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, window))
    return shapes
