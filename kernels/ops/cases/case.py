"""One test case of an op: its inputs, and the tolerance of an implementation's output against the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
)

# (in_features, out_features) of products in models with 0.6 and 8 billion weights, and the rows of a large batch.
REAL_WIDTHS = ((1024, 3072), (4096, 4096))
REAL_ROWS = 64

Make = Callable[[torch.Generator, torch.dtype], Mapping[str, Any]]  # returns the arguments of a case


@dataclass(frozen=True, slots=True)
class Case:
    """`make(generator, dtype)` returns the op's arguments on the CPU.

    The test runs the reference on the arguments in float64, and the implementation on the arguments in `dtype`. Their
    outputs may differ by `tolerances[dtype]` times the largest magnitude of the reference's output.
    """

    op: str  # "family.name", a field of Ops
    label: str
    make: Make
    tolerances: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCES)
    mutates: tuple[str, ...] = ()  # arguments or fields (`argument.field`) that the op writes; they count as outputs
    packs: tuple[str, ...] = ()  # names of the weights that the device's `linear.pack` packs before the call

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"
