"""The ops of the torch backends: for each op its reference in plain torch, its test cases and its implementations."""

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
    """The implementations that a torch device uses. Every field defaults to the plain torch reference, so a new device
    computes correctly without kernels. `replace(ops, norm=Norm())` helps to find a wrong kernel."""

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
            implementations = getattr(self, family.name)
            for op in fields(implementations):
                yield f"{family.name}.{op.name}", getattr(implementations, op.name)

    def title(self, name: str) -> str:
        """Module and function that compute "family.name", or "reference"; for display."""
        implementation = dict(self)[name]
        if implementation is dict(Ops())[name]:
            return "reference"
        return f"{implementation.__module__.split('.kernels.')[-1]}.{implementation.__name__}"

    def with_references(self, names: Iterable[str]) -> Ops:
        """These ops, with the named ones ("family.name", "family" or "all") reset to their references.

        Raises KeyError with a name that does not exist.
        """
        return self.with_ops_of(Ops(), names)

    def with_ops_of(self, other: Ops, names: Iterable[str]) -> Ops:
        """These ops, with the named ones ("family.name", "family" or "all") from `other`.

        A fused op contains its parts, so replacing a part replaces the fused op as well. Packed weights and prepared
        layers are private to a set of ops, so `pack_slices` and `prepare` are replaced together with their readers.
        Raises KeyError with a name that does not exist.
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
            for part, ops in chosen.items():
                source = getattr(other, part)
                implementations = {name: getattr(source, name) for name in ops}
                changed = replace(changed, **{part: replace(getattr(changed, part), **implementations)})
        return changed


class MultiPlatformOp:
    """The implementations of one op on all platforms, read-only: a row of the matrix op × platform, for doctor and the
    docs."""

    def __init__(self, name: str, platforms: Mapping[str, Ops]) -> None:
        self.name = name
        self.implementations: Mapping[str, str] = {platform: ops.title(name) for platform, ops in platforms.items()}

    @classmethod
    def matrix(cls, platforms: Mapping[str, Ops]) -> list[MultiPlatformOp]:
        """Every op, in the order of Ops."""
        return [cls(name, platforms) for name, _ in Ops()]
