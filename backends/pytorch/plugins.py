"""Implementations of ops in other packages: entry points of the group `localllm.ops`.

An entry point names a sequence of kernels.ops.register.Implementation. They precede the kernels of their device, and
each is tested before a model uses it. A defect is a warning: the model is loaded without that implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from inspect import isfunction, signature

import torch

from ...engine.errors import OutOfMemory
from ...kernels.ops import Ops
from ...kernels.ops.register import Implementation, KernelSet, dotted
from .device import Device
from .selftest import find_defect

GROUP = "localllm.ops"


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed plug-in. `defects`: its unused implementations, with the reasons."""

    name: str  # of the entry point; the name of its implementations in LOCALLLM_DEV_OPS
    package: str  # name and version
    implementations: tuple[Implementation, ...] = ()
    defects: tuple[str, ...] = ()


@cache
def plugins() -> tuple[Plugin, ...]:
    """The plug-ins of this environment, in the order of their names. Imports them; raises nothing."""
    return tuple(map(_read, sorted(entry_points(group=GROUP))))


def _read(entry: EntryPoint) -> Plugin:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    try:
        listed = tuple(entry.load())
    except Exception as error:  # the import of a foreign package may raise anything
        return Plugin(entry.name, package, defects=(f"cannot be loaded: {type(error).__name__}: {error}",))
    checked = [(one, _defect_of(one)) for one in listed]
    right = tuple(one for one, defect in checked if not defect)
    return Plugin(entry.name, package, right, tuple(defect for _, defect in checked if defect))


def _defect_of(one: object) -> str:
    """The reason why an entry is no implementation; empty if it is one."""
    if not isinstance(one, Implementation):
        return f"{one!r:.80} is no Implementation"
    native = dict(Ops()).get(one.op)
    if native is None:
        return f"{one.op}: localllm has no such op"
    if not isfunction(one.function):
        return f"{one.op}: {one.function!r:.80} is no Python function"
    expected = list(signature(native).parameters)
    if list(signature(one.function).parameters) != expected:
        return f"{one.op}: the parameters of {one.function.__name__} are not those of the reference, {expected}"
    return ""


def with_plugins(
    ops: Ops, kernels: Sequence[KernelSet], device: str, plugins: Sequence[Plugin]
) -> tuple[Ops, tuple[KernelSet, ...]]:
    """`ops` with the implementations of plug-ins for the backend `device`, and `kernels` with a set for each plug-in.

    Of several plug-ins with the same op, the first is used.
    """
    for plugin in reversed(plugins):
        added = [one for one in plugin.implementations if one.device == device]
        if added:
            kernels = (KernelSet(plugin.name, _as_ops(added)), *kernels)
            ops = ops.with_ops_of(kernels[0].ops, [one.op for one in added])
    return ops, tuple(kernels)


def with_tested_plugins(device: Device, dtype: torch.dtype) -> Device:
    """`device` with the implementations of plug-ins that are right on it, for models of `dtype`. Its warnings name the
    others."""

    def wrong(_: Plugin, one: Implementation) -> str:
        try:
            return find_defect(one.op, plugged, device.type, dtype)
        except OutOfMemory as error:
            return str(error)

    def hidden(_: Plugin, one: Implementation) -> str:
        return "" if used[one.op] is one.function else "is replaced by another plug-in, or by a fused op of one"

    supported = [_checked(plugin, device, partial(_unsupported, device)) for plugin in plugins()]
    plugged, _ = with_plugins(device.ops, device.kernels, device.name, supported)
    right = [_checked(plugin, device, wrong) for plugin in supported]
    ops, kernels = with_plugins(device.ops, device.kernels, device.name, right)
    used = dict(ops)
    final = [_checked(plugin, device, hidden) for plugin in right]
    warnings = [f"plug-in {plugin.name}: {defect}" for plugin in final for defect in plugin.defects]
    return replace(device, ops=ops, kernels=kernels, warnings=(*device.warnings, *warnings))


def _unsupported(device: Device, plugin: Plugin, implementation: Implementation) -> str:
    """The reason why the device cannot use an implementation; empty if it can."""
    if plugin.name in [kernel_set.name for kernel_set in device.kernels]:
        return f"has the name of kernels of {device.name}"
    if not implementation.capability <= device.capability:
        number = dotted(device.capability) or "no such number"
        return f"needs capability {dotted(implementation.capability)}, and this device has {number}"
    return ""


def _checked(plugin: Plugin, device: Device, check: Callable[[Plugin, Implementation], str]) -> Plugin:
    """The plug-in with its implementations on the device that have no defect; its defects name the others."""
    defects = {one: check(plugin, one) for one in plugin.implementations if one.device == device.name}
    more = [f"{one.op} is not used: it {defect}" for one, defect in defects.items() if defect]
    return replace(
        plugin,
        implementations=tuple(one for one, defect in defects.items() if not defect),
        defects=(*plugin.defects, *more),
    )


def _as_ops(implementations: Sequence[Implementation]) -> Ops:
    """The references, with these implementations."""
    ops = Ops()
    for one in implementations:
        family, _, name = one.op.partition(".")
        ops = replace(ops, **{family: replace(getattr(ops, family), **{name: one.function})})
    return ops
