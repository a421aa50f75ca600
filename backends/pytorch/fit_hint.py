"""The hint for a model that does not fit in memory: load options with which it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...engine.errors import ModelRefused, SettingRefused
from ...engine.files.quantization import Quant
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions

QUANTS: tuple[Quant, ...] = ("int8", "int4")  # fp8 takes as much memory as int8
MIB = 2**20
MIN_CONTEXT = 512  # tokens; the hint names no smaller context


def fitting_options(plan: Callable[[LoadOptions], MemoryPlan], options: LoadOptions) -> str:
    """The hint for a load with `options`, which does not fit. `plan` returns the memory of a load with other options,
    and raises ModelRefused or SettingRefused for options that the model does not support."""
    current = plan(options)
    rest = max(0, current.free - current.weights - current.workspace)
    if options.cache_bytes is not None and current.weights_fit:
        needed = current.cache_bytes(options.context or 1)
        if options.cache_bytes > rest:
            return f"set cache_mib to {rest // MIB} or less, or to 0 (automatic)"
        if options.cache_bytes < needed <= rest:
            return f"use a smaller context, or set cache_mib to {-(-needed // MIB)} or more"
    flags = []
    # If the plan says that the load fits, the load ran out of memory all the same: halve the context.
    limit = current.context // 2 if current.fits(options.context or 1) else current.max_positions
    context = min(current.largest_context(), limit)
    if context >= min(MIN_CONTEXT, current.max_positions):
        flags.append(f"--context {context}")
    for quant in QUANTS:
        flags += _flags(quant, plan, options, current)
    if not flags:
        return "close other programs, or choose a smaller model"
    return f"close other programs, choose a smaller model, or load it with {' or '.join(flags)}"


def _flags(
    quant: Quant, plan: Callable[[LoadOptions], MemoryPlan], options: LoadOptions, current: MemoryPlan
) -> list[str]:
    """The flags with which the model fits in the format `quant`; empty if there are none, or if the format does not
    save memory."""
    try:
        smaller = plan(replace(options, quant=quant))
    except (ModelRefused, SettingRefused):
        return []
    context = smaller.largest_context()
    if smaller.weights >= current.weights or context < min(MIN_CONTEXT, smaller.max_positions):
        return []
    if options.context is None:
        return [f"--quant {quant} (a context of {context} tokens)"]
    if context >= options.context:
        return [f"--quant {quant}"]
    return [f"--quant {quant} --context {context}"]
