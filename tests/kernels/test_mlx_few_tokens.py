"""Attention of few new tokens on MLX's CUDA device: on it, and elsewhere its source as C++."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA float32 products of more than one row keep 10 bits otherwise

import mlx.core as mx

from localllm.kernels.mlx_cuda import few_tokens as op

from . import warps

CODE = """
{CONSTANTS}
constexpr float SCALE = {SCALE};
const int q_shape[4] = {ROWS, HEADS, NEW, DIM}, k_shape[4] = {ROWS, KV_HEADS, COLUMNS, DIM};
const int64_t q_strides[4] = {HEADS * NEW * DIM, NEW * DIM, DIM, 1};
const int64_t k_strides[4] = {KV_HEADS * COLUMNS * DIM, COLUMNS * DIM, DIM, 1};
const int64_t* v_strides = k_strides;
const int logs_shape[4] = {ROWS, NEW, HEADS, SPLITS};
using O = {O};
void kernel(const T* q, const T* k, const T* v, const int* firsts, const int* ends, O* out, float* logs) {
{SOURCE}
}
void join(const float* parts, const float* logs, T* out) {
{JOIN}
}
int main() {
  const T *q = read<T>("q", ROWS * HEADS * NEW * DIM), *k = read<T>("k", ROWS * KV_HEADS * COLUMNS * DIM);
  const T* v = read<T>("v", ROWS * KV_HEADS * COLUMNS * DIM);
  const int *firsts = read<int>("firsts", ROWS), *ends = read<int>("ends", 1);
  O* out = poisoned<O>(ROWS * NEW * HEADS * SPLITS * DIM);
  float* logs = poisoned<float>(ROWS * NEW * HEADS * SPLITS);
  launch(BLOCKS, SPLITS, THREADS, [=] { kernel(q, k, v, firsts, ends, out, logs); });
  T* whole = (T*)out;
  if (SPLITS > 1) {
    whole = poisoned<T>(ROWS * NEW * HEADS * DIM);
    launch(ROWS * NEW * HEADS, 1, DIM, [=] { join((const float*)out, logs, whole); });
  }
  save("whole", whole, ROWS * NEW * HEADS * DIM);
}
"""


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    new: int
    end: int
    rows: int = 1
    window: int = 0
    columns: int = 0  # that there are; 0: as many as are used

    def arrays(self, dtype: mx.Dtype) -> dict[str, mx.array]:
        """As `reference` takes them; what lies behind the end is never to be seen."""
        rng, columns = np.random.default_rng(self.end + self.new), self.columns or self.end
        q, k, v = (
            mx.array(rng.normal(size=(self.rows, heads, length, self.dim)), dtype)
            for heads, length in ((self.heads, self.new), (self.kv_heads, columns), (self.kv_heads, columns))
        )
        behind = mx.arange(columns)[:, None] >= self.end
        k, v = (mx.where(behind, mx.array(math.nan, dtype), x) for x in (k, v))
        firsts = mx.array([row * 37 % (self.end - self.new + 1) for row in range(self.rows)], mx.int32)
        return {"q": q, "k": k, "v": v, "firsts": firsts, "ends": mx.array([self.end], mx.int32)}

    def expected(self, q: mx.array, k: mx.array, v: mx.array, firsts: mx.array, ends: mx.array) -> mx.array:
        """In float32, token by token."""
        q, k, v = (x.astype(mx.float32) for x in (q, k, v))
        shared, out = self.heads // self.kv_heads, np.zeros((self.rows, self.heads, self.new, self.dim), np.float32)
        for row in range(self.rows):
            for token in range(self.new):
                last = self.end - self.new + token + 1
                first = max(firsts[row].item(), last - self.window if self.window else 0)
                for head in range(self.heads):
                    keys, values = k[row, head // shared, first:last], v[row, head // shared, first:last]
                    out[row, head, token] = mx.softmax(keys @ q[row, head, token] * self.dim**-0.5) @ values
        return mx.array(out)


CASES = {
    "one tile": Case(2, 1, 64, 3, 40),
    "a new row": Case(4, 2, 64, 9, 9),
    "heads that share": Case(6, 2, 128, 7, 90, columns=96),
    "rows of their own length": Case(4, 4, 64, 17, 130, rows=3, columns=256),
    "window": Case(4, 1, 64, 20, 150, rows=2, window=24),
    "window of one": Case(2, 1, 64, 5, 33, window=1),
    "many tiles": Case(8, 1, 128, 18, 70),
    "more than fit a block": Case(10, 2, 64, 33, 66),
}
SPLITS = [1, 8]


@pytest.mark.emulated
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_its_source_equals_the_reference(tmp_path: Path, case: Case, splits: int) -> None:
    given, scale = case.arrays(mx.bfloat16), case.dim**-0.5
    tiles = -(-case.heads // case.kv_heads * case.new // op.TILE)
    blocks, threads = op._launch(tiles, case.rows * case.kv_heads)
    constants = {
        "ROWS": case.rows,
        "HEADS": case.heads,
        "KV_HEADS": case.kv_heads,
        "NEW": case.new,
        "DIM": case.dim,
        "COLUMNS": case.columns or case.end,
        "WINDOW": case.window,
        "SPLITS": splits,
        "BLOCKS": blocks,
        "THREADS": threads,
    }
    parts = {
        "CONSTANTS": "\n".join(f"constexpr int {name} = {value};" for name, value in constants.items()),
        "SCALE": scale,
        "O": "T" if splits == 1 else "float",
        "SOURCE": op.SOURCE.replace("LOGS", op.LOGS if splits > 1 else ""),
        "JOIN": op.JOIN,
    }
    warps.run(CODE, parts, given, tmp_path)
    found = warps.bf16(tmp_path / "whole").reshape(case.rows, case.new, case.heads, case.dim).swapaxes(1, 2)
    np.testing.assert_allclose(np.array(found), np.array(case.expected(**given)), rtol=0, atol=1.5e-2)


@pytest.mark.real_otherdevice
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_tokens_see_what_lies_before_them(case: Case, dtype: mx.Dtype, long: bool) -> None:
    case = case._replace(end=case.end + 1500, columns=case.columns and case.columns + 1500) if long else case
    given, scale = case.arrays(dtype), case.dim**-0.5
    expected = case.expected(**given)
    if not (mx.cuda.is_available() and op.fits(case.new, (case.dim, case.dim), dtype)):
        # What stands in for the kernel multiplies all columns.
        given |= {name: mx.where(mx.isnan(given[name]), 0, given[name]) for name in "kv"}
    # As a part of something larger.
    given["q"] = mx.concatenate([given["q"], given["q"]], axis=-1)[..., : case.dim]
    for splits in {*SPLITS, op.shares(case.end, *given["q"].shape[:3])}:
        found = op.attend(*given.values(), case.window, splits, scale)
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        tolerance = {mx.float32: 1e-4, mx.float16: 3e-3, mx.bfloat16: 1.5e-2}[dtype]
        np.testing.assert_allclose(np.array(found.astype(mx.float32)), np.array(expected), rtol=0, atol=tolerance)


def test_what_the_kernel_computes() -> None:
    assert op.fits(64, (128, 128), mx.bfloat16)
    assert not op.fits(65, (128, 128), mx.bfloat16)
    assert not op.fits(8, (256, 256), mx.bfloat16), "too many registers"
    assert not op.fits(8, (128, 64), mx.float16)
    assert not op.fits(8, (128, 128), mx.float32)


def test_how_many_warps_share_the_columns_of_a_query() -> None:
    assert op.shares(60, 1, 16, 8) == 1
    assert op.shares(4112, 1, 32, 16) == 32
    assert op.shares(4112, 1, 32, 64) == 8
    assert op.shares(40_000, 8, 32, 64) == 1
