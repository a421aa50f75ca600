"""Rope with the write into the caches: the kernel where MLX computes on CUDA, elsewhere what stands in for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx

from localllm.kernels.metal import rope_store as op
from localllm.kernels.mlx_cuda.decode import decode
from localllm.kernels.mlx_cuda.rope_store import prepared

pytestmark = pytest.mark.real_otherdevice

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
TOLERANCES = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


class Case(NamedTuple):
    """What is asked of the op: rows that began at different columns."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    rope: op.Rope
    rows: int = 3
    columns: int = 32
    end: int = 30


CASES = {
    "qwen3": Case(16, 8, 128, 128, op.Rope(128, False, 1e6)),
    "many rows": Case(4, 2, 64, 64, op.Rope(64, False, 1e4), rows=40),
    "the first column": Case(4, 2, 64, 64, op.Rope(64, False, 1e4), rows=1, end=1),
    "the last column": Case(4, 2, 64, 64, op.Rope(64, False, 1e4), end=32),
    "part of a head": Case(7, 1, 80, 80, op.Rope(32, False, 1e4)),
    "neighbours": Case(6, 3, 96, 96, op.Rope(96, True, 1e4)),
    "neighbours, part": Case(6, 3, 96, 96, op.Rope(24, True, 1e4)),
    "slower positions": Case(4, 4, 64, 64, op.Rope(64, False, 1e4, 0.125)),
    "freqs": Case(4, 2, 64, 64, op.Rope(64, False, None, freqs=mx.array(7.0 ** np.arange(32) + 1.0, mx.float32))),
    "no turn": Case(4, 2, 16, 16, op.Rope(16, False, None, freqs=mx.array([1.0, 2.0] + [np.inf] * 6))),
    "short values": Case(4, 2, 64, 24, op.Rope(64, False, 1e4)),
    "long values": Case(4, 2, 32, 128, op.Rope(32, True, 1e4)),
}


class Given(NamedTuple):
    """As `reference` takes them."""

    q: mx.array
    k: mx.array
    v: mx.array
    keys: mx.array
    values: mx.array
    padding: mx.array
    end: mx.array


def given(case: Case, dtype: Any) -> Given:
    """What is turned is part of something larger, as projections leave it; every other column holds no number."""
    rng = np.random.default_rng(case.heads + case.end)

    def new(heads: int, dim: int) -> mx.array:
        x = mx.array(rng.normal(size=(case.rows, 2, heads, dim)), dtype)
        return x[:, :1].transpose(0, 2, 1, 3)

    held = [mx.full((case.rows, case.kv_heads, case.columns, dim), np.nan, dtype) for dim in (case.dim, case.value_dim)]
    padding = [row * 13 % case.end for row in range(case.rows)]
    new_ones = new(case.heads, case.dim), new(case.kv_heads, case.dim), new(case.kv_heads, case.value_dim)
    return Given(*new_ones, *held, mx.array(padding, mx.int32), mx.array([case.end], mx.int32))


def plain(x: np.ndarray, rope: op.Rope, positions: np.ndarray) -> np.ndarray:
    """[rows, heads, 1, dim] turned, in numpy."""
    half = rope.dims // 2
    speeds = rope.base ** -(np.arange(half) / half) if rope.freqs is None else 1 / np.array(rope.freqs, np.float64)
    angles = (positions * rope.scale)[:, None, None, None] * speeds
    places = np.arange(rope.dims).reshape(half, 2).T if rope.traditional else np.arange(rope.dims).reshape(2, half)
    one, other = x[..., places[0]], x[..., places[1]]
    turned = x.copy()
    turned[..., places[0]] = one * np.cos(angles) - other * np.sin(angles)
    turned[..., places[1]] = one * np.sin(angles) + other * np.cos(angles)
    return turned


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def check(case: Case, asked: Given, found: op.Stored) -> None:
    tolerance = TOLERANCES[asked.q.dtype]
    assert {x.dtype for x in found} == {asked.q.dtype}
    positions = case.end - 1 - np.array(asked.padding)
    turned, key = (plain(numbers(x), case.rope, positions) for x in (asked.q, asked.k))
    np.testing.assert_allclose(numbers(found.queries), turned, rtol=0, atol=tolerance)
    for held, new, near in ((found.keys, key, tolerance), (found.values, numbers(asked.v), 0)):
        columns = numbers(held)
        np.testing.assert_allclose(columns[:, :, case.end - 1], new[:, :, 0], rtol=0, atol=near)
        assert np.isnan(np.delete(columns, case.end - 1, axis=2)).all(), "other columns are as they were"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_one_column_is_written(name: str, dtype: str) -> None:
    case, asked = CASES[name], given(CASES[name], DTYPES[dtype])
    mx.eval(asked)
    store = prepared(asked.q, asked.keys, asked.values, case.rope)
    found = store(*asked)
    mx.eval(found.queries)  # as attention asks for it, and with it for the write
    if mx.cuda.is_available():
        assert found.keys is asked.keys
        assert found.values is asked.values
    check(case, asked, found)
    again = op.reference(*given(case, DTYPES[dtype]), case.rope)
    for ours, theirs in zip(found, again, strict=True):
        np.testing.assert_allclose(numbers(ours), numbers(theirs), rtol=0, atol=TOLERANCES[DTYPES[dtype]])


@pytest.mark.parametrize("steps", [1, 100])
def test_steps_that_follow_at_once_see_each_other(steps: int) -> None:
    """Nothing is waited for: attention of each step reads what all before it wrote."""
    rope, rng, rows, columns = op.Rope(64, False, 1e4), np.random.default_rng(steps), 4, 512
    padding = mx.array([0, 3, 0, 9], mx.int32)
    q, k, v = (mx.array(rng.normal(size=(steps, rows, heads, 1, 64)), mx.float16) for heads in (8, 4, 4))
    told = list[list[mx.array]]()
    for kind in (prepared, None):
        held = [mx.zeros((rows, 4, columns, 64), mx.float16) + 0 for _ in "kv"]
        mx.eval(held, padding, q, k, v)
        x, outs = q[0], list[mx.array]()
        for step in range(steps):
            asked = x, k[step], v[step], *held, padding, mx.array([400 + step + 1], mx.int32)
            turned, *held = op.reference(*asked, rope) if kind is None else kind(x, *held, rope)(*asked)
            x = 0.5 * x + decode(turned, *held, padding, asked[-1], 1, 0.125)
            outs.append(x)
            mx.async_eval(x)
        told.append(outs)
    for ours, theirs in zip(*told, strict=True):
        assert mx.allclose(ours, theirs, rtol=0, atol=1e-2)


def test_what_the_kernel_computes() -> None:
    def fits(dtypes: Any, dims: tuple[int, int], turned: int) -> bool:
        return op.fits(dims, dtypes, op.Rope(turned, False, 1e4))

    assert fits([mx.bfloat16] * 3, (128, 128), 128)
    assert fits([mx.float32] * 3, (64, 512), 32)
    assert not fits([mx.bfloat16, mx.float16, mx.float16], (128, 128), 128)
    assert not fits([mx.bfloat16] * 3, (128, 1024), 128)
    assert not fits([mx.bfloat16] * 3, (128, 128), 256)
    assert not fits([mx.int32] * 3, (128, 128), 128)
