"""Recurrent layers: updates of 1 and of 16 rows by one token, and a prefill of 512 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from localllm.kernels.ops.attention import Rows
from localllm.kernels.ops.state import Conv, Delta, Ssd, StateRows

from .work import Arguments, Work, randn

DELTA = 32, 16, 128, 128  # value heads, key heads, key dim and value dim of Qwen3-Next
SSD = 48, 1, 128, 64  # heads, groups, state dim and head dim of Granite 4 Tiny
WIDTH = 4


def state(dtype: torch.dtype) -> Iterator[Work]:
    """The bound of updates is the time to read and to write the states. That of a prefill counts the products with
    states, the scores of a chunk, and the triangular system."""
    for rows, tokens in ((1, 1), (16, 1), (1, 512)):
        label = f"{rows} rows of {tokens}"
        shapes: list[tuple[str, tuple[int, ...], int]] = [("gated_delta", DELTA, 3), ("ssd", SSD, 2)]
        for op, (heads, shared, key_dim, dim), products in shapes:
            sizes = heads * key_dim * dim
            chunk = min(tokens, 64) * heads * (key_dim * (products - 1) + dim * (products - 1)) / 2
            yield Work(
                f"state.{op}",
                f"{label}, {heads}/{shared} heads of {key_dim} × {dim}",
                partial(_delta if op == "gated_delta" else _ssd, dtype, rows, tokens),
                8.0 * rows * sizes,
                operations=2.0 * rows * tokens * (products * sizes + chunk),
                kinds=("f32",),
            )
        heads, shared, key_dim, dim = DELTA
        channels = 2 * shared * key_dim + heads * dim
        read = float(8 * rows * (WIDTH - 1) * channels + dtype.itemsize * rows * tokens * channels)
        yield Work("state.conv", f"{label}, {channels} channels", partial(_conv, dtype, rows, tokens, 1), read)
        yield Work("state.short_conv", f"{label}, {channels} channels", partial(_conv, dtype, rows, tokens, 3), read)
        norm = partial(_norm, dtype, rows * tokens)
        yield Work("state.gated_norm", label, norm, float(2 * dtype.itemsize * rows * tokens * heads * dim))


def _rows(rows: int, tokens: int) -> StateRows:
    starts = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32)
    context = torch.full((rows,), tokens + 100, dtype=torch.int32)
    table = torch.zeros(rows, 0, dtype=torch.int32)
    step = Rows(starts, context, table, (tokens,) * rows, (tokens + 100,) * rows)
    return StateRows(step, torch.arange(rows, dtype=torch.int32))


def _delta(dtype: torch.dtype, rows: int, tokens: int) -> Arguments:
    heads, shared, key_dim, dim = DELTA
    a, b = randn(dtype, 2, rows * tokens, heads)
    qkv = randn(dtype, rows * tokens, 2 * shared * key_dim + heads * dim)
    target = Delta(torch.randn(rows, heads, key_dim, dim), torch.rand(heads), torch.randn(heads))
    return {"qkv": qkv, "a": a, "b": b, "rows": _rows(rows, tokens), "target": target}


def _ssd(dtype: torch.dtype, rows: int, tokens: int) -> Arguments:
    heads, groups, state_dim, dim = SSD
    x = randn(dtype, rows * tokens, heads * dim + 2 * groups * state_dim)
    target = Ssd(torch.randn(rows, heads, state_dim, dim), torch.rand(heads), *torch.randn(2, heads))
    return {"x": x, "dt": randn(dtype, rows * tokens, heads), "rows": _rows(rows, tokens), "target": target}


def _conv(dtype: torch.dtype, rows: int, tokens: int, parts: int) -> Arguments:
    heads, shared, key_dim, dim = DELTA
    channels = 2 * shared * key_dim + heads * dim
    target = Conv(randn(dtype, WIDTH, channels), torch.randn(rows, WIDTH - 1, channels))
    return {"x": randn(dtype, rows * tokens, parts * channels), "rows": _rows(rows, tokens), "target": target}


def _norm(dtype: torch.dtype, tokens: int) -> Arguments:
    heads, _, _, dim = DELTA
    x, gate = randn(dtype, 2, tokens, heads, dim)
    return {"x": x, "gate": gate, "weight": randn(dtype, dim), "eps": 1e-6, "order": "norm-gate"}
