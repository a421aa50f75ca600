"""Matrix products with weights of every format, and the token embedding.

Every product is (x, weight, bias=None, dtype=None) -> Tensor: x [..., ins], weight of [outs, ins] as the device's own
`pack_slices` holds it, bias [outs] of any float type; the answer [..., outs] is of `dtype`, else of x's (the head over
the vocabulary asks for float32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Importers take a format and its product from here.
from . import linear_fp8 as linear_fp8
from . import linear_int4 as linear_int4
from . import linear_int8 as linear_int8
from .case import Case, Make
from .linear_fp8 import Fp8 as Fp8
from .linear_int4 import Int4 as Int4
from .linear_int8 import Int8 as Int8

Weight = Tensor | Int8 | Int4 | Fp8  # as loaded, before a device packs it
PANEL = 32  # slices of a weight are of a multiple of as many outputs, the last one of any number


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x @ weightᵀ + bias for a weight of any float type, which x's type must be able to hold."""
    shift = None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight.to(x.dtype), shift).to(dtype or x.dtype)


def embedding(tokens: Tensor, weight: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of weight [vocab, dim] for tokens [tokens] in `dtype` (else the weight's), times scale rounded to it."""
    rows = F.embedding(tokens, weight).to(dtype or weight.dtype)
    return rows if scale == 1.0 else rows * rounded(scale, rows.dtype)


def rounded(x: float, dtype: torch.dtype) -> float:
    """The number of this float type that is nearest to x, which is a normal one. It makes no tensor, which would be one
    of the CPU, and a graph of a GPU cannot capture its copy."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, digits)), exponent - digits)


def pack_slices(slices: Iterable[Weight], outs: int, dtype: torch.dtype) -> Any:
    """A weight of `outs` outputs as this device's products want it for activations of `dtype`; here: plain ones in that
    type. It comes a number of outputs at a time, at least one slice, so that what it is made of is never there whole;
    a slice may be gone once the next is asked for."""
    packed: Any = None
    start = 0
    for part in slices:
        weight = part.to(dtype) if isinstance(part, Tensor) else part
        if packed is None:
            packed = changed(weight, lambda tensor: tensor.new_empty(outs, *tensor.shape[1:]))
        stop = start + len(parts(weight)[0])
        for whole, tensor in zip(parts(packed), parts(weight), strict=True):
            whole[start:stop] = tensor
        start = stop
    return packed


def changed(weight: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The weight, packed or not, with each of its tensors changed, in the order of `parts`."""
    if isinstance(weight, Tensor):
        return change(weight)
    return type(weight)(*(change(part) if isinstance(part, Tensor) else part for part in weight))


def parts(weight: Any) -> list[Tensor]:
    """The tensors that a weight, packed or not, is made of."""
    return [weight] if isinstance(weight, Tensor) else [part for part in weight if isinstance(part, Tensor)]


@dataclass(frozen=True, slots=True)
class Linear:
    """Which implementation of each product a device uses. Products are given what `pack_slices` made, or a
    plain weight."""

    dense: Callable[..., Tensor] = dense
    int8: Callable[..., Tensor] = linear_int8.int8
    int4: Callable[..., Tensor] = linear_int4.int4
    int4_wide: Callable[..., Tensor] = linear_int4.int4_wide
    fp8: Callable[..., Tensor] = linear_fp8.fp8
    embedding: Callable[..., Tensor] = embedding
    pack_slices: Callable[[Iterable[Weight], int, torch.dtype], Any] = pack_slices

    def pack(self, weight: Weight, dtype: torch.dtype) -> Any:
        """pack_slices of a weight that is there whole."""
        return self.pack_slices([weight], len(parts(weight)[0]), dtype)


def _product(rows: int, ins: int, outs: int, bias: bool = False, **more: Any) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x = torch.randn(rows, ins, generator=generator).to(dtype)
        weight = (torch.randn(outs, ins, generator=generator) / ins**0.5).to(dtype)
        shift = torch.randn(outs, generator=generator) if bias else None
        return {"x": x, "weight": weight, "bias": shift, **more}

    return make


def _narrow(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    """Weights are held as stored: float32 activations meet bfloat16 weights."""
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
]
