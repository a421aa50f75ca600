"""The register of the ops: the definition of each op, and its implementations on each platform.

A device lists sets of kernels. Other packages add implementations (backends/pytorch/plugins.py). One implementation of
each op is chosen when a model is loaded, and a runner has these functions themselves, in Ops: a step looks nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import Ops

REFERENCE = "reference"

Capability = tuple[int, ...]  # of a device, e.g. (9, 0) or (9, 4, 2); empty: the device has no such number


def dotted(capability: Capability) -> str:
    """A capability for display, e.g. 9.0."""
    return ".".join(map(str, capability))


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The kernels of one library or language for one device."""

    name: str  # in LOCALLLM_DEV_OPS
    ops: Ops
    capability: Capability = ()  # the minimum; empty: every device that the backend accepts
    base: Ops = field(default_factory=Ops)  # the ops that `ops` has where the set has no kernel

    def serves(self, op: str) -> bool:
        """Whether the set itself implements "family.name"."""
        return self.name == REFERENCE or dict(self.ops)[op] is not dict(self.base)[op]


REFERENCES = KernelSet(REFERENCE, Ops())


def usable(kernels: Sequence[KernelSet], capability: Capability) -> tuple[KernelSet, ...]:
    """The sets that a device of this capability can run."""
    return tuple(one for one in kernels if one.capability <= capability)


class Implementation(NamedTuple):
    """An implementation of one op that a plug-in lists (backends/pytorch/plugins.py)."""

    op: str  # "family.name", a field of Ops
    device: str  # name of the backend
    function: Callable[..., Any]  # has the parameters of the reference, and its results
    capability: Capability = ()  # the minimum


class Platform(NamedTuple):
    """The ops of one device, and the sets that they are from: the fastest first, the references last."""

    ops: Ops
    kernels: Sequence[KernelSet]


@dataclass(frozen=True, slots=True)
class MultiPlatformOp:
    """One op: its definition, its function on each platform, and its other implementations.

    SGLang's forward_cuda is forward["cuda"] here, and forward_native is `native`.
    """

    name: str
    native: Callable[..., Any]  # the definition in plain torch
    forward: Mapping[str, Callable[..., Any]]  # platform -> the function of its Ops
    implementations: Mapping[str, tuple[KernelSet, ...]]  # platform -> the sets that have the op, the fastest first

    def source(self, platform: str) -> str:
        """The name of the set that has the function of the platform."""
        sets = self.implementations[platform]
        return next((one.name for one in sets if dict(one.ops)[self.name] is self.forward[platform]), REFERENCE)


def register(platforms: Mapping[str, Platform]) -> dict[str, MultiPlatformOp]:
    """Every op by its name, in the order of Ops."""
    functions = {platform: dict(one.ops) for platform, one in platforms.items()}
    sets = {platform: one.kernels for platform, one in platforms.items()}
    return {
        name: MultiPlatformOp(
            name,
            native,
            {platform: own[name] for platform, own in functions.items()},
            {platform: tuple(one for one in kernels if one.serves(name)) for platform, kernels in sets.items()},
        )
        for name, native in Ops()
    }
