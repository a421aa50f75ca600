"""Benchmarks of linear layers in every weight format. Few rows are bound by reads of the weight, many by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.linear import Fp8, Int4, Int8
from .cpu_peaks import beyond_caches
from .work import MOST_SETS, Work

GROUP = 64
REPEATED = 1 << 23
# Format: op, bytes per weight, ceilings that apply to float32 activations, and to bfloat16 activations.
_OPS: Mapping[str, tuple[str, float, Sequence[str], Sequence[str]]] = {
    "bf16": ("dense", 2.0, ("f32",), ("f32", "bf16", "tile_bf16")),
    "int8": ("int8", 1.0, ("int8", "tile_int8"), ("int8", "tile_int8")),
    "int4": ("int4", 0.5 + 3 / GROUP, ("int8", "tile_int8"), ("int8", "tile_int8")),
    "int4_wide": ("int4_wide", 0.5 + 3 / GROUP, ("f32",), ("f32", "bf16", "tile_bf16")),
    "fp8": ("fp8", 1.0, ("f32",), ("f32", "bf16", "tile_bf16")),
}


def works(
    formats: Sequence[str], rows: Sequence[int], shapes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> Iterator[Work]:
    """Works for all formats, rows and `shapes` (ins, outs). `dtype`: dtype of activations."""
    for fmt in formats:
        op, width, with_f32, with_bf16 = _OPS[fmt]
        for ins, outs in shapes:
            for count in rows:
                yield Work(
                    op=f"linear.{op}",
                    label=f"{fmt}, {count} × {ins} × {outs}",
                    make=partial(_arguments, fmt, count, ins, outs, dtype),
                    bytes=width * ins * outs + dtype.itemsize * count * (ins + outs),
                    peer=_product,
                    operations=2.0 * count * ins * outs,
                    kinds=with_bf16 if dtype == torch.bfloat16 else with_f32,
                    packs=("weight",),
                    dtype=dtype,
                )


def _arguments(fmt: str, count: int, ins: int, outs: int, dtype: torch.dtype) -> Mapping[str, Any]:
    return {"x": torch.randn(count, ins).to(dtype), "weight": _weight(fmt, ins, outs)}


def _product(x: Tensor, weight: Any) -> Tensor:
    """torch's linear with an unquantised weight of the same shape, in the dtype of the activations."""
    outs = (weight if isinstance(weight, Tensor) else weight.data).shape[0]
    return F.linear(x, next(_plain(outs, x.shape[1], x.dtype)))


@lru_cache(maxsize=1)
def _plain(outs: int, ins: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """A cycle of several weights, so that none stays in the caches."""
    one = _normal(outs, ins).to(dtype)
    sets = min(MOST_SETS, max(1, round(beyond_caches() / one.nbytes)))
    return cycle([one.clone() for _ in range(sets)])


def _weight(fmt: str, ins: int, outs: int) -> Any:
    """A random weight, because speed depends on the data."""
    if fmt == "bf16":
        return _normal(outs, ins).bfloat16()
    if fmt == "int8":
        return Int8(_bytes(outs, ins).view(torch.int8).clamp(min=-127), torch.rand(outs) / ins)
    if fmt == "fp8":
        return Fp8(_normal(outs, ins).to(torch.float8_e4m3fn), torch.rand(outs, 1) / ins, ins)
    groups = -(-ins // GROUP)
    zero = torch.randint(0, 17, (outs, groups), dtype=torch.uint8)
    return Int4(_bytes(outs, ins // 2), (torch.rand(outs, groups) / ins).half(), zero, GROUP, ins)


def _normal(outs: int, ins: int) -> Tensor:
    return _repeated(_normals(), outs, ins)


def _bytes(outs: int, ins: int) -> Tensor:
    return _repeated(_normals().view(torch.uint8), outs, ins)


@lru_cache(maxsize=1)
def _normals() -> Tensor:
    return torch.randn(REPEATED)


def _repeated(numbers: Tensor, outs: int, ins: int) -> Tensor:
    """[outs, ins], the numbers repeated. There are enough of them that branch and value prediction do not help."""
    return numbers.repeat(-(-outs * ins // len(numbers)))[: outs * ins].view(outs, ins)
