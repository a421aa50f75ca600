"""A benchmark case of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOATS = ("f32", "bf16", "tile_bf16")

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """A benchmark case of an op. `make` returns new arguments on the CPU; `reference` computes the same with torch."""

    op: str  # "family.name", an op of Ops
    label: str
    make: Callable[[], Arguments]
    bytes: float
    reference: Callable[..., Any] | None = None  # None: that of kernels/ops
    operations: float = 0.0  # a multiply-add counts as two
    kinds: Sequence[str] = FLOATS  # instructions for the op (peaks.py); the fastest kind sets the bound
    packs: Sequence[str] = ()  # weights that the device packs before the measurement


def randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)
