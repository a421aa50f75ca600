"""The ops of the torch family: for each its meaning in plain torch, its test cases, and who implements it where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from . import activation, attention, kv, layer, linear, norm, rope, sampling
from .activation import Activation
from .attention import Attention
from .case import Case
from .kv import KV
from .layer import Layer
from .linear import Linear
from .norm import Norm
from .rope import Rope
from .sampling import Sampling

CASES: tuple[Case, ...] = tuple(
    case for family in (norm, activation, rope, linear, kv, attention, sampling, layer) for case in family.CASES
)


@dataclass(frozen=True, slots=True)
class Ops:
    """What a torch device computes with. Every field defaults to the plain torch reference, so a new device is right
    on its first day; `replace(OPS, norm=Norm())` bisects a wrong one."""

    norm: Norm = field(default_factory=Norm)
    activation: Activation = field(default_factory=Activation)
    rope: Rope = field(default_factory=Rope)
    linear: Linear = field(default_factory=Linear)
    kv: KV = field(default_factory=KV)
    attention: Attention = field(default_factory=Attention)
    sampling: Sampling = field(default_factory=Sampling)
    layer: Layer = field(default_factory=Layer)

    def __iter__(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """("family.name", implementation) of every op."""
        for family in fields(self):
            held = getattr(self, family.name)
            for op in fields(held):
                yield f"{family.name}.{op.name}", getattr(held, op.name)

    def title(self, name: str) -> str:
        """Who computes "family.name", for people."""
        found = dict(self)[name]
        if found is dict(Ops())[name]:
            return "reference"
        return f"{found.__module__.split('.kernels.')[-1]}.{found.__name__}"

    def with_references(self, names: Iterable[str]) -> Ops:
        """These ops, but the named ones ("family.name", "family" or "all") back at their references.

        Raises KeyError with a name that there is not.
        """
        return self.with_ops_of(Ops(), names)

    def with_ops_of(self, other: Ops, names: Iterable[str]) -> Ops:
        """These ops, but the named ones ("family.name", "family" or "all") from `other`.

        An op made of others in one go goes with any of them, or the one that was named would still be in there. One
        set of ops cannot read what another packed or prepared: that goes with it. Raises KeyError with a name that
        there is not.
        """
        changed = self
        for name in names:
            if name == "all":
                return other
            family, _, op = name.partition(".")
            if family not in {part.name for part in fields(other)}:
                raise KeyError(name)
            if op and op not in {part.name for part in fields(getattr(other, family))}:
                raise KeyError(name)
            chosen = {family: {op} if op else {part.name for part in fields(getattr(other, family))}}
            if family == "linear" and op != "embedding":
                chosen[family].add("pack_slices")
            if family in ("norm", "rope") or name == "kv.store":
                chosen.setdefault("kv", set()).add("append")
            if family != "sampling" and name not in ("linear.embedding", "kv.copy_pages"):
                chosen["layer"] = {part.name for part in fields(other.layer)}
            for held, ops in chosen.items():
                taken = {one: getattr(getattr(other, held), one) for one in ops}
                changed = replace(changed, **{held: replace(getattr(changed, held), **taken)})
        return changed


class MultiPlatformOp:
    """One op by platform, read-only: the matrix op × platform read by rows, for doctor and the docs."""

    def __init__(self, name: str, platforms: Mapping[str, Ops]) -> None:
        self.name = name
        self.implementations: Mapping[str, str] = {platform: ops.title(name) for platform, ops in platforms.items()}

    @classmethod
    def matrix(cls, platforms: Mapping[str, Ops]) -> list[MultiPlatformOp]:
        """Every op, in the order of Ops."""
        return [cls(name, platforms) for name, _ in Ops()]
