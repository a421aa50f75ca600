"""Attention of one new token a row: the kernel where MLX computes on CUDA, elsewhere what stands in for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx

from localllm.kernels.mlx_cuda import decode as op

pytestmark = pytest.mark.real_otherdevice

# heads, kv heads, dim
HEADS = [(16, 8, 128), (8, 8, 64), (8, 2, 256), (32, 4, 128), (7, 1, 96)]


def plain(q, keys, values, firsts, end, scale):
    """In numpy, row by row."""
    shared = q.shape[1] // keys.shape[1]
    out = np.zeros(q.shape)
    for row, first in enumerate(firsts):
        for head in range(q.shape[1]):
            held, of = keys[row, head // shared, first:end], values[row, head // shared, first:end]
            scores = held @ q[row, head, 0] * scale
            weights = np.exp(scores - scores.max())
            out[row, head, 0] = weights @ of / weights.sum()
    return out


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("rows", "room", "end"), [(1, 256, 1), (3, 512, 300), (5, 256, 256), (2, 4608, 4500)])
def test_each_row_sees_its_own_columns(
    dtype, heads: int, kv_heads: int, dim: int, rows: int, room: int, end: int
) -> None:
    rng = np.random.default_rng(dim + end)
    q, keys, values = (
        mx.array(rng.normal(size=shape), dtype)
        for shape in ((rows, heads, 1, dim), (rows, kv_heads, room, dim), (rows, kv_heads, room, dim))
    )
    firsts = [row * 97 % end for row in range(rows)]
    seen, scale = (mx.array(firsts, mx.int32), mx.array([end], mx.int32)), 1 / math.sqrt(dim)
    # Others may have written behind the end, and queries and keys may be parts of something larger.
    behind = mx.arange(room)[:, None] >= end
    keys, values = mx.where(behind, mx.array(3e4, dtype), keys), mx.where(behind, mx.array(3e4, dtype), values)
    q = mx.concatenate([q, q], axis=-1)[..., :dim]
    keys = mx.concatenate([keys, keys], axis=2)[:, :, :room]
    found = op.decode(q, keys, values, *seen, op.shares(end - min(firsts), rows), scale)
    assert (found.shape, found.dtype) == (q.shape, dtype)
    wanted = plain(*(np.array(x.astype(mx.float32)) for x in (q, keys, values)), firsts, end, scale)
    tolerance = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 1.2e-2}[dtype]
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), wanted, rtol=0, atol=tolerance)


def test_what_the_kernel_computes() -> None:
    def fits(dtype, heads: int, kv_heads: int, dim: int) -> bool:
        return op.fits((1, heads, 1, dim), kv_heads, (dim, dim), (dtype,) * 3)

    assert all(fits(mx.bfloat16, *shape) for shape in HEADS[:4])
    assert not fits(mx.bfloat16, *HEADS[4])
    assert not fits(mx.float32, *HEADS[0])
    assert not fits(mx.float16, 32, 2, 128), "too many sums for a block's memory"
