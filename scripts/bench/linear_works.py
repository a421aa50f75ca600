"""Benchmarks of linear layers in every weight format. Weight reads bound small batches, arithmetic large batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import cycle
from typing import Any

import torch
from cpu_peaks import beyond_caches
from torch import Tensor
from torch.nn import functional as F
from work import MAX_SETS, Work

from localllm.kernels.ops.linear import Fp8, Int4, Int8, Mxfp4

GROUP = 64
REPEATED = 1 << 23
# For each format: op, bytes per weight, kinds of instructions (cpu_peaks.KINDS) for float32 activations, and kinds of
# instructions for bfloat16 activations.
OPS: Mapping[str, tuple[str, float, Sequence[str], Sequence[str]]] = {
    "bf16": ("dense", 2.0, ("f32",), ("f32", "bf16", "tile_bf16")),
    "int8": ("int8", 1.0, ("int8", "tile_int8"), ("int8", "tile_int8")),
    "int4": ("int4", 0.5 + 3 / GROUP, ("int8", "tile_int8"), ("int8", "tile_int8")),
    "int4_wide": ("int4_wide", 0.5 + 3 / GROUP, ("f32",), ("f32", "bf16", "tile_bf16")),
    "fp8": ("fp8", 1.0, ("f32",), ("f32", "bf16", "tile_bf16")),
    "mxfp4": ("mxfp4", 0.5 + 1 / 32, ("f32",), ("f32", "bf16", "tile_bf16")),
}


def works(
    formats: Sequence[str], rows: Sequence[int], shapes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> Iterator[Work]:
    """A `Work` for each combination of format, number of rows and shape (in_features, out_features).

    `dtype`: dtype of the activations.
    """
    for fmt in formats:
        op, width, with_f32, with_bf16 = OPS[fmt]
        for in_features, out_features in shapes:
            for count in rows:
                yield Work(
                    op=f"linear.{op}",
                    label=f"{fmt}, {count} × {in_features} × {out_features}",
                    make=partial(_arguments, fmt, count, in_features, out_features, dtype),
                    bytes=width * in_features * out_features + dtype.itemsize * count * (in_features + out_features),
                    reference=_product,
                    operations=2.0 * count * in_features * out_features,
                    kinds=with_bf16 if dtype == torch.bfloat16 else with_f32,
                    packs=("weight",),
                    dtype=dtype,
                )


def _arguments(fmt: str, count: int, in_features: int, out_features: int, dtype: torch.dtype) -> Mapping[str, Any]:
    return {"x": torch.randn(count, in_features).to(dtype), "weight": random_weight(fmt, in_features, out_features)}


def _product(x: Tensor, weight: Any) -> Tensor:
    """torch's linear with an unquantised weight of the same shape, in the dtype of the activations."""
    out_features = (weight if isinstance(weight, Tensor) else weight.data).shape[0]
    return F.linear(x, next(_plain(out_features, x.shape[1], x.dtype)))


@lru_cache(maxsize=1)
def _plain(out_features: int, in_features: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """An endless cycle of several copies of a weight, so that no copy stays in the caches."""
    weight = _normal(out_features, in_features).to(dtype)
    sets = min(MAX_SETS, max(1, round(beyond_caches() / weight.nbytes)))
    return cycle([weight.clone() for _ in range(sets)])


def random_weight(fmt: str, in_features: int, out_features: int) -> Any:
    """A random weight, because the speed depends on the data."""
    if fmt == "bf16":
        return _normal(out_features, in_features).bfloat16()
    if fmt == "int8":
        return Int8(
            _bytes(out_features, in_features).view(torch.int8).clamp(min=-127), torch.rand(out_features) / in_features
        )
    if fmt == "fp8":
        return Fp8(
            _normal(out_features, in_features).to(torch.float8_e4m3fn),
            torch.rand(out_features, 1) / in_features,
            in_features,
        )
    if fmt == "mxfp4":
        exponent = torch.randint(110, 116, (out_features, in_features // 32), dtype=torch.uint8)
        return Mxfp4(_bytes(out_features, in_features // 2), exponent)
    groups = -(-in_features // GROUP)
    zero = torch.randint(0, 17, (out_features, groups), dtype=torch.uint8)
    return Int4(
        _bytes(out_features, in_features // 2),
        (torch.rand(out_features, groups) / in_features).half(),
        zero,
        GROUP,
        in_features,
    )


def _normal(out_features: int, in_features: int) -> Tensor:
    return _repeated(_normals(), out_features, in_features)


def _bytes(out_features: int, in_features: int) -> Tensor:
    return _repeated(_normals().view(torch.uint8), out_features, in_features)


@lru_cache(maxsize=1)
def _normals() -> Tensor:
    return torch.randn(REPEATED)


def _repeated(numbers: Tensor, out_features: int, in_features: int) -> Tensor:
    """`numbers` repeated to [out_features, in_features]. Their period is too long for the CPU to predict."""
    return numbers.repeat(-(-out_features * in_features // len(numbers)))[: out_features * in_features].view(
        out_features, in_features
    )
