"""Test cases of the ops of state.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..attention import Rows
from ..state import Conv, Delta, GateOrder, Ssd, StateRows
from .case import Case, Make

PADDING = -1  # in place of the number of earlier tokens: a row without a state slot

Lens = list[tuple[int, int]]  # tokens of each row, and the number of earlier tokens of its sequence


def state_rows(lens: Lens, generator: torch.Generator) -> StateRows:
    """Rows with slots in any order, below 2 * rows + 1."""
    counts = [tokens for tokens, _ in lens]
    contexts = [tokens + max(before, 0) for tokens, before in lens]
    slots = torch.randperm(2 * len(lens) + 1, generator=generator)[: len(lens)].to(torch.int32)
    slots[torch.tensor([before == PADDING for _, before in lens], dtype=torch.bool)] = -1
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    table = torch.zeros(len(lens), 0, dtype=torch.int32)
    rows = Rows(starts, torch.tensor(contexts, dtype=torch.int32), table, tuple(counts), tuple(contexts))
    return StateRows(rows, slots)


def _states(lens: Lens, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The states of all slots, also of those that no row may read."""
    return torch.randn(2 * len(lens) + 1, *shape, generator=generator)


def conv_arguments(lens: Lens, channels: int = 80, width: int = 4, parts: int = 1, bias: bool = True) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        rows = state_rows(lens, generator)
        tokens = len(lens) and int(rows.rows.row_starts[-1])
        x = torch.randn(tokens, parts * channels + 3, generator=generator).to(dtype)
        weight = torch.randn(width, channels, generator=generator).to(dtype)
        shift = torch.randn(channels, generator=generator).to(dtype) if bias else None
        target = Conv(weight, _states(lens, (width - 1, channels), generator), shift)
        return {"x": x[:, : parts * channels], "rows": rows, "target": target}

    return make


def delta_arguments(lens: Lens, heads: int = 4, key_heads: int = 2, key_dim: int = 32, value_dim: int = 32) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        rows = state_rows(lens, generator)
        tokens = len(lens) and int(rows.rows.row_starts[-1])
        a, b = torch.randn(2, tokens, heads, generator=generator).to(dtype)
        states = _states(lens, (heads, key_dim, value_dim), generator)
        rates = torch.rand(heads, generator=generator) * 2.0
        width = 2 * key_heads * key_dim + heads * value_dim
        qkv = torch.randn(tokens, width, generator=generator).to(dtype)
        target = Delta(states, rates, torch.randn(heads, generator=generator) - 2.0)
        return {"qkv": qkv, "a": a, "b": b, "rows": rows, "target": target}

    return make


def ssd_arguments(lens: Lens, heads: int = 4, groups: int = 2, state: int = 32, dim: int = 16, **limits: float) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        rows = state_rows(lens, generator)
        tokens = len(lens) and int(rows.rows.row_starts[-1])
        rates = torch.rand(heads, generator=generator) * 2.0
        shift, skip = torch.randn(2, heads, generator=generator)
        target = Ssd(_states(lens, (heads, state, dim), generator), rates, shift - 2.0, skip, **limits)
        x = torch.randn(tokens, heads * dim + 2 * groups * state, generator=generator).to(dtype)
        return {"x": x, "dt": torch.randn(tokens, heads, generator=generator).to(dtype), "rows": rows, "target": target}

    return make


def _norm(shape: tuple[int, int, int], order: GateOrder, weight: tuple[int, ...] | None = None) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x, gate = torch.randn(2, *shape, generator=generator).to(dtype)
        scale = torch.randn(weight or shape[-1:], generator=generator).to(dtype)
        return {"x": x, "gate": gate, "weight": scale, "eps": 1e-6, "order": order}

    return make


_DECODE = [(1, 9), (1, 0), (1, 700), (1, PADDING), (1, 3)]
_MIXED = [(1, 5), (7, 0), (2, 2), (0, 4), (5, 8), (1, PADDING), (3, 0)]
_CHUNKS = [(63, 0), (64, 2), (65, 7)]
_WIDE = {"heads": 4, "key_heads": 2, "key_dim": 128, "value_dim": 128}  # head sizes of real models

CASES = [
    Case("state.conv", "decode", conv_arguments(_DECODE), mutates=("target.states",)),
    Case("state.conv", "mixed", conv_arguments(_MIXED), mutates=("target.states",)),
    Case("state.conv", "narrow", conv_arguments(_MIXED, channels=5, width=3, bias=False), mutates=("target.states",)),
    Case("state.conv", "width-2", conv_arguments(_MIXED, width=2), mutates=("target.states",)),
    Case("state.conv", "many-channels", conv_arguments(_MIXED, channels=300), mutates=("target.states",)),
    Case("state.conv", "padding-only", conv_arguments([(1, PADDING), (1, PADDING)]), mutates=("target.states",)),
    Case("state.conv", "no-rows", conv_arguments([]), mutates=("target.states",)),
    Case(
        "state.short_conv", "decode", conv_arguments(_DECODE, width=3, parts=3, bias=False), mutates=("target.states",)
    ),
    Case("state.short_conv", "mixed", conv_arguments(_MIXED, width=3, parts=3), mutates=("target.states",)),
    Case("state.short_conv", "many-channels", conv_arguments(_MIXED, 300, parts=3), mutates=("target.states",)),
    Case("state.short_conv", "no-rows", conv_arguments([], parts=3), mutates=("target.states",)),
    Case("state.gated_delta", "decode", delta_arguments(_DECODE), mutates=("target.states",)),
    Case("state.gated_delta", "decode-wide", delta_arguments(_DECODE, **_WIDE), mutates=("target.states",)),
    Case("state.gated_delta", "mixed", delta_arguments(_MIXED), mutates=("target.states",)),
    Case("state.gated_delta", "chunk-borders", delta_arguments(_CHUNKS, 1, 1, 128, 64), mutates=("target.states",)),
    Case("state.gated_delta", "chunks", delta_arguments([(130, 0), (1, 4), (67, 6)], 2, 1), mutates=("target.states",)),
    Case(
        "state.gated_delta", "odd-sizes", delta_arguments([*_MIXED, (70, 1)], 3, 1, 11, 13), mutates=("target.states",)
    ),
    Case("state.gated_delta", "equal-heads", delta_arguments([(40, 1)], 3, 3, 16, 24), mutates=("target.states",)),
    Case(
        "state.gated_delta", "padding-only", delta_arguments([(1, PADDING), (1, PADDING)]), mutates=("target.states",)
    ),
    Case("state.gated_delta", "no-rows", delta_arguments([]), mutates=("target.states",)),
    Case("state.ssd", "decode", ssd_arguments(_DECODE), mutates=("target.states",)),
    Case("state.ssd", "decode-wide", ssd_arguments(_DECODE, 4, 1, 128, 64), mutates=("target.states",)),
    Case("state.ssd", "mixed", ssd_arguments(_MIXED), mutates=("target.states",)),
    Case("state.ssd", "chunk-borders", ssd_arguments(_CHUNKS, 2, 1, 128, 64), mutates=("target.states",)),
    Case("state.ssd", "chunks", ssd_arguments([(130, 0), (1, 4), (67, 6)], 2, 1), mutates=("target.states",)),
    Case("state.ssd", "odd-sizes", ssd_arguments([*_MIXED, (70, 1)], 3, 1, 11, 13), mutates=("target.states",)),
    Case("state.ssd", "limits", ssd_arguments(_MIXED, dt_min=0.05, dt_max=0.3), mutates=("target.states",)),
    Case("state.ssd", "no-rows", ssd_arguments([]), mutates=("target.states",)),
    Case("state.gated_norm", "norm-gate", _norm((5, 4, 32), "norm-gate")),
    Case("state.gated_norm", "gate-norm", _norm((5, 1, 192), "gate-norm")),
    Case("state.gated_norm", "groups", _norm((3, 4, 48), "gate-norm", (4, 48))),
    Case("state.gated_norm", "groups-norm-gate", _norm((3, 2, 61), "norm-gate", (2, 61))),
    Case("state.gated_norm", "no-rows", _norm((0, 2, 32), "gate-norm")),
]
