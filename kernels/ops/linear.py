"""Matrix products with weights of every format, and the token embedding.

Every product has the signature (x, weight, bias=None, dtype=None) -> Tensor: x [..., in_features], weight
[out_features, in_features] packed by `pack_slices` of the same device, bias [out_features] of any float dtype. The
output [..., out_features] has `dtype`, by default x's dtype. The output head (lm_head) passes float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Other modules import all formats and their products from this module.
from . import linear_fp8 as linear_fp8
from . import linear_int4 as linear_int4
from . import linear_int8 as linear_int8
from . import linear_mxfp4 as linear_mxfp4
from .cases.case import REAL_ROWS, REAL_WIDTHS, Case, Make
from .linear_fp8 import Fp8 as Fp8
from .linear_int4 import Int4 as Int4
from .linear_int8 import Int8 as Int8
from .linear_mxfp4 import Mxfp4 as Mxfp4

Weight = Tensor | Int8 | Int4 | Fp8 | Mxfp4  # a weight before packing
PANEL = 32  # every slice of a weight has a multiple of PANEL outputs, except the last slice


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x @ weightᵀ + bias. Weight and bias may have any float dtype; they are converted to x's dtype."""
    shift = None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight.to(x.dtype), shift).to(dtype or x.dtype)


def embedding(tokens: Tensor, weight: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of weight [vocab, dim] for tokens [tokens], times scale -> [tokens, dim] in `dtype`.

    `dtype` is the weight's by default. The scale is rounded to `dtype` first, as in a model that computes in `dtype`.
    """
    rows = F.embedding(tokens, weight).to(dtype or weight.dtype)
    return rows if scale == 1.0 else rows * rounded(scale, rows.dtype)


def rounded(x: float, dtype: torch.dtype) -> float:
    """The value of this float dtype that is nearest to x; it must not be subnormal. The function uses no tensor,
    because a GPU graph cannot capture a copy from a CPU tensor."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, digits)), exponent - digits)


def pack_slices(slices: Iterable[Weight], out_features: int, dtype: torch.dtype) -> Any:
    """The weight of `out_features` outputs, packed for this device's products with activations of `dtype`.

    The weight arrives as at least one slice of its outputs, so the full unpacked weight is never in memory. A slice
    may become invalid when the next one is read from `slices`. The reference converts plain weights to `dtype`.
    """
    packed: Any = None
    start = 0
    for part in slices:
        weight = part.to(dtype) if isinstance(part, Tensor) else part
        if packed is None:
            packed = map_tensors(weight, lambda tensor: tensor.new_empty(out_features, *tensor.shape[1:]))
        stop = start + len(weight_tensors(weight)[0])
        for target, source in zip(weight_tensors(packed), weight_tensors(weight), strict=True):
            target[start:stop] = source
        start = stop
    return packed


def map_tensors(weight: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The weight, packed or not, with `change` applied to each of its tensors, in the order of `weight_tensors`."""
    if isinstance(weight, Tensor):
        return change(weight)
    return type(weight)(*(change(part) if isinstance(part, Tensor) else part for part in weight))


def weight_tensors(weight: Any) -> list[Tensor]:
    """The tensors of a weight, packed or not."""
    return [weight] if isinstance(weight, Tensor) else [part for part in weight if isinstance(part, Tensor)]


@dataclass(frozen=True, slots=True)
class Linear:
    """The implementations of the products on a device. Products take a weight packed by `pack_slices`, or a plain
    weight."""

    dense: Callable[..., Tensor] = dense
    int8: Callable[..., Tensor] = linear_int8.int8
    int4: Callable[..., Tensor] = linear_int4.int4
    int4_wide: Callable[..., Tensor] = linear_int4.int4_wide
    fp8: Callable[..., Tensor] = linear_fp8.fp8
    mxfp4: Callable[..., Tensor] = linear_mxfp4.mxfp4
    embedding: Callable[..., Tensor] = embedding
    pack_slices: Callable[[Iterable[Weight], int, torch.dtype], Any] = pack_slices

    def pack(self, weight: Weight, dtype: torch.dtype) -> Any:
        """The packed form of a weight that is one slice."""
        return self.pack_slices([weight], len(weight_tensors(weight)[0]), dtype)


def _product(rows: int, in_features: int, out_features: int, bias: bool = False, **more: Any) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x = torch.randn(rows, in_features, generator=generator).to(dtype)
        weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
        shift = torch.randn(out_features, generator=generator) if bias else None
        return {"x": x, "weight": weight, "bias": shift, **more}

    return make


def _narrow(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    """A product of float32 activations with a bfloat16 weight, as in a checkpoint that stores bfloat16."""
    inputs = _product(5, 64, 48)(generator, dtype)
    return {**inputs, "weight": inputs["weight"].to(torch.bfloat16)}


def _lookup(scale: float, stored: torch.dtype | None = None) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        tokens = torch.randint(0, 50, (9,), generator=generator, dtype=torch.int32)
        weight = torch.randn(50, 33, generator=generator).to(stored or dtype)
        return {"tokens": tokens, "weight": weight, "scale": scale, "dtype": dtype if stored else None}

    return make


_WEIGHT = ("weight",)
_F32_BF16 = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

CASES = [
    *(Case("linear.dense", f"{rows}-rows", _product(rows, 64, 48), packs=_WEIGHT) for rows in (0, 1, 4, 5, 31, 32, 33)),
    Case("linear.dense", "257-rows", _product(257, 70, 49), packs=_WEIGHT),
    Case("linear.dense", "one-row-wide", _product(1, 384, 1024), packs=_WEIGHT),
    Case("linear.dense", "odd-shape", _product(3, 37, 29), packs=_WEIGHT),
    Case("linear.dense", "one-by-one", _product(2, 1, 1), packs=_WEIGHT),
    Case("linear.dense", "deep", _product(4, 3000, 33), packs=_WEIGHT),
    Case("linear.dense", "bias", _product(5, 64, 50, bias=True), packs=_WEIGHT),
    Case("linear.dense", "head", _product(3, 64, 500, dtype=torch.float32), packs=_WEIGHT),
    Case("linear.dense", "head-of-many", _product(40, 64, 500, dtype=torch.float32), packs=_WEIGHT),
    Case("linear.dense", "head-with-bias", _product(33, 72, 50, bias=True, dtype=torch.float32), packs=_WEIGHT),
    Case("linear.dense", "other-weight-type", _narrow, _F32_BF16, packs=_WEIGHT),
    Case("linear.embedding", "plain", _lookup(1.0)),
    Case("linear.embedding", "scaled", _lookup(32**0.5), _F32_BF16),
    Case("linear.embedding", "widened", _lookup(32**0.5, torch.bfloat16), _F32_BF16),
    *linear_int8.CASES,
    *linear_int4.CASES,
    *linear_fp8.CASES,
    *linear_mxfp4.CASES,
]

# Products of real models, for `localllm selftest`. The tests of all devices use the smaller CASES.
REAL_CASES = [
    *(
        Case("linear.dense", f"{widths[0]}-to-{widths[1]}", _product(REAL_ROWS, *widths), packs=_WEIGHT)
        for widths in REAL_WIDTHS
    ),
    *linear_int8.REAL_CASES,
    *linear_int4.REAL_CASES,
    *linear_fp8.REAL_CASES,
    *linear_mxfp4.REAL_CASES,
]
