"""Test cases of the ops of norm.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .case import Case, Make


def _inputs(shape: tuple[int, ...], offset: float, residual: bool, scale: float = 1.0) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x = torch.randn(shape, generator=generator) * scale
        weight = torch.randn(shape[-1], generator=generator) * 0.1 + (1.0 - offset)
        inputs: dict[str, Any] = {"x": x.to(dtype), "weight": weight.to(dtype), "eps": 1e-6, "offset": offset}
        if residual:
            inputs["residual"] = torch.randn(shape, generator=generator).to(dtype)
        return inputs

    return make


def _layer(shape: tuple[int, ...], biased: bool, shift: float = 0.0) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x = torch.randn(shape, generator=generator) + shift
        weight, bias = torch.randn(2, shape[-1], generator=generator) * 0.1 + 1.0
        return {"x": x.to(dtype), "weight": weight.to(dtype), "bias": bias.to(dtype) if biased else None, "eps": 1e-5}

    return make


def _stored(residual: bool, kinds: Mapping[torch.dtype, torch.dtype]) -> Make:
    """Weights keep the dtype of the checkpoint, so their dtype may differ from x's."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        inputs = _inputs((5, 96), 0.0, residual)(generator, dtype)
        return {**inputs, "weight": inputs["weight"].to(kinds[dtype])}

    return make


_F32 = torch.float32
_BF16 = torch.bfloat16
_F16 = torch.float16
_WIDER = {_F32: _BF16, _BF16: _F32, _F16: _F32}
_HALVES = {_F32: _F16, _BF16: _F16, _F16: _BF16}


CASES = [
    Case("norm.rms", "plain", _inputs((5, 96), 0.0, residual=False)),
    Case("norm.rms", "one-row", _inputs((1, 384), 0.0, residual=False)),
    Case("norm.rms", "heads", _inputs((3, 4, 64), 0.0, residual=False)),
    Case("norm.rms", "odd-width", _inputs((2, 33), 0.0, residual=False)),
    Case("norm.rms", "no-rows", _inputs((0, 64), 0.0, residual=False)),
    Case("norm.rms", "gemma", _inputs((5, 96), 1.0, residual=False)),
    Case("norm.rms", "large-values", _inputs((4, 128), 0.0, residual=False, scale=1e4)),
    Case("norm.rms", "small-values", _inputs((4, 128), 0.0, residual=False, scale=1e-4)),
    Case("norm.rms", "other-weight-type", _stored(False, _WIDER)),
    Case("norm.rms", "half-weight", _stored(False, _HALVES)),
    Case("norm.add_rms", "plain", _inputs((5, 96), 0.0, residual=True)),
    Case("norm.add_rms", "gemma", _inputs((7, 64), 1.0, residual=True)),
    Case("norm.add_rms", "odd-width", _inputs((3, 61), 0.0, residual=True)),
    Case("norm.add_rms", "half-weight", _stored(True, _HALVES)),
    Case("norm.add_rms", "no-rows", _inputs((0, 64), 0.0, residual=True)),
    Case("norm.layer", "plain", _layer((5, 96), biased=True)),
    Case("norm.layer", "no-bias", _layer((5, 96), biased=False)),
    Case("norm.layer", "odd-width", _layer((3, 61), biased=True)),
    Case("norm.layer", "no-rows", _layer((0, 64), biased=True)),
    Case("norm.layer", "far-from-zero", _layer((4, 128), biased=True, shift=30.0)),
]
