"""Root-mean-square normalisation (Zhang & Sennrich, 2019) and layer normalisation (Ba et al., 2016)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (offset + weight) over the last dimension, computed in float32 at least, rounded once.

    x [..., dim], weight [dim]; the output has x's shape and dtype. Gemma stores weight - 1, so its offset is 1.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide)
    if offset:
        scale = scale + offset
    return F.rms_norm(x.to(wide), x.shape[-1:], scale, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). An implementation may overwrite x and residual."""
    residual = x + residual
    return rms_norm(residual, weight, eps, offset), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in float32 at least, rounded once.

    x [..., dim], weight and bias [dim]; the output has x's shape and dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    shift = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), shift, eps).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Norm:
    """The implementations of the norms on a device."""

    rms: Callable[..., Tensor] = rms_norm
    add_rms: Callable[..., tuple[Tensor, Tensor]] = add_rms_norm
    layer: Callable[..., Tensor] = layer_norm
