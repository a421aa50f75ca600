"""Products with MXFP4 weights (OCP Microscaling Formats, 2023): 4-bit floats (e2m1), a power of two per 32 inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .linear_fp8 import Fp8

GROUP = 32  # inputs per power of two
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_POSITIVE, *(-value for value in _POSITIVE))  # the values of the 16 numbers


class Mxfp4(NamedTuple):
    """A weight [out_features, in_features]: e2m1 number * 2^(exponent - 127). in_features is a multiple of 32."""

    data: Tensor  # [out_features, in_features / 2] uint8: numbers of two inputs, the even input in the low bits
    exponent: Tensor  # [out_features, in_features / 32] uint8, 0…254. Kernels may read 2^-127 (exponent 0) as 0.

    @property
    def numbers(self) -> Tensor:
        """[out_features, in_features] uint8, 0…15: indices in E2M1."""
        return torch.stack((self.data & 15, self.data >> 4), dim=-1).flatten(-2)

    @property
    def scale(self) -> Tensor:
        """[out_features, in_features / 32] float32, the powers of two."""
        bits = self.exponent.int() << 23
        smallest = torch.full_like(bits, 1 << 22)  # the bits of 2^-127, which has no exponent of its own
        return torch.where(bits == 0, smallest, bits).view(torch.float32)

    def dense(self) -> Tensor:
        """The weight [out_features, in_features] in float32, exact."""
        return self.fp8().dense()

    def fp8(self) -> Fp8:
        """The same values in e4m3."""
        magnitude = self.numbers & 7
        # e4m3 has these magnitudes at exponents from 2^-1 to 2^2; its exponent bias is 7, that of e2m1 is 1.
        bits = torch.where(magnitude > 1, (magnitude << 2) + 48, magnitude * 48)
        signs = (self.numbers & 8) << 4
        return Fp8((bits | signs).view(torch.float8_e4m3fn), self.scale, GROUP)


def mxfp4(x: Tensor, weight: Mxfp4, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The W4A16 product; linear.py has its arguments. Activations are not rounded; sums are float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = F.linear(x.to(wide), weight.dense().to(wide), None if bias is None else bias.to(wide))
    return out.to(dtype or x.dtype)


def as_fp8(slices: Iterable[Any]) -> Iterator[Fp8]:
    """The slices of a weight in e4m3, with the same values in twice the memory."""
    for weight in slices:
        yield weight.fp8()
