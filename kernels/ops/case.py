"""One test case of an op: its inputs, and how near an implementation must come to the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
)

Make = Callable[[torch.Generator, torch.dtype], Mapping[str, Any]]  # the arguments of a case


@dataclass(frozen=True, slots=True)
class Case:
    """`make(generator, dtype)` gives the op's arguments on the CPU.

    The test casts them to float64, runs the reference on those, and asks an implementation, given the arguments in
    `dtype`, to agree within `tolerances[dtype]` of the largest magnitude in the reference's answer.
    """

    op: str  # "family.name", a field of Ops
    label: str
    make: Make
    tolerances: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCES)
    mutates: tuple[str, ...] = ()  # arguments, or fields of them after dots, that the op writes: part of its answer
    packs: tuple[str, ...] = ()  # weights that an implementation is given as its own `linear.pack` holds them

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"
