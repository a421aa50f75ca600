"""Matrix products with weights of every format, and the token embedding.

Every product has the signature (x, weight, bias=None, dtype=None) -> Tensor: x [..., in_features], weight
[out_features, in_features] packed by `pack_slices` of the same device, bias [out_features] of any float dtype. The
output [..., out_features] has `dtype`, by default x's dtype. The output head (lm_head) passes float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
