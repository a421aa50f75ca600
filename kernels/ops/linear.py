"""Matrix products with weights: projections, the token embedding and the head over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .case import Case


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, in] @ weight [out, in]ᵀ + bias [out] -> [tokens, out], in x's dtype."""
    return F.linear(x, weight, bias)


def embedding(tokens: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Rows of weight [vocab, dim] for tokens [tokens], times scale rounded to the weight's dtype (as Gemma does)."""
    rows = F.embedding(tokens, weight)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=weight.dtype, device=weight.device)


def head(x: Tensor, weight: Tensor, soft_cap: float = 0.0) -> Tensor:
    """Logits [rows, vocab] in float32 (float64 for float64), softly capped to ±soft_cap unless that is 0."""
    logits = F.linear(x, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if soft_cap == 0.0 else torch.tanh(logits / soft_cap) * soft_cap


@dataclass(frozen=True, slots=True)
class Linear:
    """Which implementation of each product a device uses."""

    dense: Callable[..., Tensor] = dense
    embedding: Callable[..., Tensor] = embedding
    head: Callable[..., Tensor] = head


def _product(rows: int, width: int, out: int, **more: float):
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x = torch.randn(rows, width, generator=generator).to(dtype)
        weight = (torch.randn(out, width, generator=generator) / width**0.5).to(dtype)
        return {"x": x, "weight": weight, **more}

    return make


def _biased(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    return {**_product(5, 64, 48)(generator, dtype), "bias": torch.randn(48, generator=generator).to(dtype)}


def _lookup(scale: float):
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        tokens = torch.randint(0, 50, (9,), generator=generator, dtype=torch.int32)
        return {"tokens": tokens, "weight": torch.randn(50, 32, generator=generator).to(dtype), "scale": scale}

    return make


CASES = [
    Case("linear.dense", "plain", _product(5, 64, 48)),
    Case("linear.dense", "one-row", _product(1, 384, 1024)),
    Case("linear.dense", "odd-shape", _product(3, 37, 29)),
    Case("linear.dense", "no-rows", _product(0, 64, 48)),
    Case("linear.dense", "bias", _biased),
    Case("linear.embedding", "plain", _lookup(1.0)),
    Case("linear.embedding", "scaled", _lookup(32**0.5)),
    Case("linear.head", "plain", _product(3, 64, 500)),
    Case("linear.head", "soft-cap", _product(3, 64, 500, soft_cap=1.5)),
]
