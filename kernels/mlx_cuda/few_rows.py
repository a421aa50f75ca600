"""Products of few rows, whose weights are read once.

MLX asks cuBLAS for a plan each time it multiplies more than one row: for a step of a small model that takes longer than
all else (backends/mlx/projections.py has figures).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any
from zlib import crc32

import mlx.core as mx

HALVES = (mx.float16, mx.bfloat16)
THREADS = 256
ROWS = 64  # most; beyond, cuBLAS' kernels are worth their plan
CHUNK = 32  # inputs that a warp multiplies at once

# A block computes OUTS outputs of all rows; its warps share the inputs, and are summed up at the end. Tensor cores take
# weights as their first factor and rows as their second. Which input is multiplied in which place of a tile does not
# matter as long as both agree, so a thread takes 16 bytes that lie together.
SOURCE = """
    constexpr int WARPS = 8, PARTS = OUTS / 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = lane % 4, line = lane / 4;
    const int first = blockIdx.x * OUTS;
    int rows = 1;
    for (int i = 0; i < x_ndim - 1; i++) rows *= x_shape[i];

    const uint4* weights[PARTS][2];
    #pragma unroll
    for (int p = 0; p < PARTS; p++)
      #pragma unroll
      for (int h = 0; h < 2; h++)
        weights[p][h] = (const uint4*)(w + int64_t(min(first + p * 16 + h * 8 + line, N - 1)) * K + quarter * 8);
    const uint4* inputs[TILES];
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      inputs[t] = (const uint4*)(x + int64_t(min(t * 8 + line, rows - 1)) * K + quarter * 8);

    float sums[PARTS][TILES][4];
    #pragma unroll
    for (int p = 0; p < PARTS; p++)
      #pragma unroll
      for (int t = 0; t < TILES; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) sums[p][t][i] = 0.0f;

    uint4 ahead[PARTS][2];
    int chunk = warp;
    #pragma unroll
    for (int p = 0; p < PARTS; p++)
      #pragma unroll
      for (int h = 0; h < 2; h++)
        ahead[p][h] = chunk < K / 32 ? __ldcs(weights[p][h] + chunk * 4) : make_uint4(0, 0, 0, 0);
    for (; chunk < K / 32; chunk += WARPS) {
      uint4 a[PARTS][2];
      #pragma unroll
      for (int p = 0; p < PARTS; p++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
          a[p][h] = ahead[p][h];
          if (chunk + WARPS < K / 32) ahead[p][h] = __ldcs(weights[p][h] + (chunk + WARPS) * 4);
        }
      #pragma unroll
      for (int t = 0; t < TILES; t++) {
        const uint4 b = __ldg(inputs[t] + chunk * 4);
        #pragma unroll
        for (int p = 0; p < PARTS; p++) {
          multiply(sums[p][t], a[p][0].x, a[p][1].x, a[p][0].y, a[p][1].y, b.x, b.y);
          multiply(sums[p][t], a[p][0].z, a[p][1].z, a[p][0].w, a[p][1].w, b.z, b.w);
        }
      }
    }

    // 4, 5 to 0, 1; 6, 7 to 2, 3; 2, 3 to 0, 1; 1 to 0: two at a time fit into a block's memory.
    __shared__ float given[2][PARTS * TILES * 4][32];
    const int from[4] = {4, 6, 2, 1}, to[4] = {0, 2, 0, 0}, count[4] = {2, 2, 2, 1};
    #pragma unroll
    for (int r = 0; r < 4; r++) {
      __syncthreads();
      if (warp >= from[r] && warp < from[r] + count[r]) {
        #pragma unroll
        for (int i = 0; i < PARTS * TILES * 4; i++)
          given[warp - from[r]][i][lane] = sums[i / (TILES * 4)][i / 4 % TILES][i % 4];
      }
      __syncthreads();
      if (warp >= to[r] && warp < to[r] + count[r]) {
        #pragma unroll
        for (int i = 0; i < PARTS * TILES * 4; i++)
          sums[i / (TILES * 4)][i / 4 % TILES][i % 4] += given[warp - to[r]][i][lane];
      }
    }
    if (warp > 0) return;
    #pragma unroll
    for (int i = 0; i < PARTS * TILES * 4; i++) {
      const int place = i % 4, row = i / 4 % TILES * 8 + quarter * 2 + place % 2;
      const int output = first + i / (TILES * 4) * 16 + place / 2 * 8 + line;
      if (row < rows && output < N) out[int64_t(row) * N + output] = T(sums[i / (TILES * 4)][i / 4 % TILES][place]);
    }
"""
HEADER = """
__device__ inline void multiply(
    float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""


def reference(x: mx.array, weight: mx.array) -> mx.array:
    """x [..., inputs], weight [outputs, inputs] -> [..., outputs] in their dtype, summed up in float32."""
    return x @ weight.T


def fits(rows: int, weight: mx.array, dtype: mx.Dtype) -> bool:
    """Whether the kernel computes these."""
    return 1 < rows <= ROWS and dtype == weight.dtype and dtype in HALVES and weight.shape[1] % CHUNK == 0


@cache
def _kernel(dtype: mx.Dtype) -> Any:
    header = HEADER.replace("KIND", "bf16" if dtype == mx.bfloat16 else "f16")
    name = f"localllm_few_rows_{crc32((header + SOURCE).encode()):08x}"  # by which MLX finds it again
    return mx.fast.cuda_kernel(name, ["x", "w"], ["out"], SOURCE, header)


def shape(rows: int) -> tuple[int, int]:
    """(tiles of 8 rows, outputs of a block). Each is compiled when it is first met: there are four."""
    tiles = 1 << (-(-rows // 8) - 1).bit_length()
    return tiles, 32 if tiles <= 2 else 64  # of many rows more is read than of weights: by as few blocks as can be


@lru_cache(4096)
def _call(tiles: int, outs: int, outputs: int, inputs: int, dtype: mx.Dtype) -> Callable[..., list[mx.array]]:
    """The kernel with all that these calls have in common."""
    constants = {"N": outputs, "K": inputs, "OUTS": outs, "TILES": tiles}
    return partial(
        _kernel(dtype),
        template=[("T", dtype), *constants.items()],
        grid=(THREADS * -(-outputs // outs), 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_dtypes=[dtype],
    )


def product(x: mx.array, weight: mx.array, turned: mx.array) -> mx.array:
    """See `reference`, which computes what does not fit; `turned` is the weight's transpose."""
    before = x.shape[:-1]
    rows = math.prod(before)
    if not mx.cuda.is_available() or not fits(rows, weight, x.dtype):
        return x @ turned
    call = _call(*shape(rows), *weight.shape, x.dtype)
    return call(inputs=[x, weight], output_shapes=[(*before, len(weight))])[0]
