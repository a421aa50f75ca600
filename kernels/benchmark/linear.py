"""Products of every weight format, at few rows (reading the weight once is the floor) and at many (arithmetic is)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.linear import Fp8, Int4, Int8
from .work import Work

GROUP = 64
# Format: the op, bytes of a weight, ceilings that apply with float32 and with bfloat16 activations.
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
    """`shapes` are (ins, outs); `dtype` is that of activations."""
    for fmt in formats:
        op, width, with_f32, with_bf16 = _OPS[fmt]
        for ins, outs in shapes:
            for count in rows:
                yield Work(
                    op=f"linear.{op}",
                    label=f"{fmt}, {count} × {ins} × {outs}",
                    make=lambda fmt=fmt, count=count, ins=ins, outs=outs: _arguments(fmt, count, ins, outs, dtype),
                    bytes=width * ins * outs + dtype.itemsize * count * (ins + outs),
                    torch=_product,
                    operations=2.0 * count * ins * outs,
                    kinds=with_bf16 if dtype == torch.bfloat16 else with_f32,
                    packs=("weight",),
                    dtype=dtype,
                )


_plain: dict[tuple[int, int, torch.dtype], Tensor] = {}


def _arguments(fmt: str, count: int, ins: int, outs: int, dtype: torch.dtype) -> Mapping[str, Any]:
    x = torch.randn(count, ins).to(dtype)
    return {"x": x, "weight": _weight(fmt, ins, outs)}


def _product(x: Tensor, weight: Any) -> Tensor:
    """torch's own product of the same numbers of rows and columns, with a weight in the type of the activations."""
    outs = (weight if isinstance(weight, Tensor) else weight.data).shape[0]
    key = outs, x.shape[1], x.dtype
    if key not in _plain:
        _plain.clear()
        _plain[key] = (torch.randn(outs, x.shape[1]) / x.shape[1] ** 0.5).to(x.dtype)
    return F.linear(x, _plain[key])


def _weight(fmt: str, ins: int, outs: int) -> Any:
    """Random and never zeros: speed depends on the data."""
    if fmt == "bf16":
        return (torch.randn(outs, ins) / ins**0.5).bfloat16()
    if fmt == "int8":
        return Int8(torch.randint(-127, 128, (outs, ins), dtype=torch.int8), torch.rand(outs) / ins)
    if fmt == "fp8":
        return Fp8(torch.randn(outs, ins).to(torch.float8_e4m3fn), torch.rand(outs, 1) / ins, ins)
    groups = -(-ins // GROUP)
    nibbles = torch.randint(0, 256, (outs, ins // 2), dtype=torch.uint8)
    zero = torch.randint(0, 17, (outs, groups), dtype=torch.uint8)
    return Int4(nibbles, (torch.rand(outs, groups) / ins).half(), zero, GROUP, ins)
