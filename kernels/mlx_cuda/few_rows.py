"""Products of few rows, whose weights are read once.

MLX asks cuBLAS for a plan each time it multiplies more than one row: for a step of a small model that takes longer than
all else (backends/mlx/projections.py has figures). The plan is what this saves: of chains of products on an H200, MLX's
took 1.04 to 1.41 times as long as these within the limits below, and down to 0.22 times as long beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx

from .tensor_cores import HALVES, multiply

WARPS, THREADS = 8, 256  # of a block
ROWS = 16  # most; beyond, cuBLAS' kernels are worth their plan
WEIGHT = 2**25  # its numbers, at most; larger ones take long to read, at which cuBLAS is better
CHUNK = 128  # inputs that a warp multiplies at once
BLOCKS = 128  # that keep the GPU busy

# SLICES warps of a block share the inputs, and are summed up at the end; its other warps have other outputs, and find
# what they read of x in the multiprocessor's cache. Tensor cores take weights as their first factor and rows as their
# second. Which input is multiplied in which place of a tile does not matter as long as both agree, so a thread takes 16
# bytes that lie together:
#
#   lane = 4 line + quarter     weights: outputs line and line + 8 of 16, 8 inputs of 32 from 8 quarter on
#                               x: row line of 8, the same inputs
#                               sums: rows 2 quarter and 2 quarter + 1, outputs line and line + 8
#
# A warp's weights of one chunk, 256 bytes of each of 16 PARTS outputs, are always on their way: 32 or 64 KiB a block,
# where memory wants some 40 of each multiprocessor to be as fast as it can.
SOURCE = """
    constexpr int WARPS = 8, PIECES = 4, OUTS = 16 * PARTS * WARPS / SLICES;
    const int N = w_shape[0], K = w_shape[1], chunks = K / (32 * PIECES);
    const int warp = threadIdx.x / 32, slice = warp % SLICES;
    const int lane = threadIdx.x % 32, quarter = lane % 4, line = lane / 4;
    const int first = blockIdx.x * OUTS + warp / SLICES * 16 * PARTS;
    int rows = 1;
    for (int i = 0; i < x_ndim - 1; i++) rows *= x_shape[i];

    const uint4* weights[PARTS][2];
    #pragma unroll
    for (int p = 0; p < PARTS; p++)
      #pragma unroll
      for (int h = 0; h < 2; h++)
        weights[p][h] = (const uint4*)(w + int64_t(min(first + p * 16 + h * 8 + line, N - 1)) * K) + quarter;
    int inputs[TILES];
    #pragma unroll
    for (int t = 0; t < TILES; t++) inputs[t] = min(t * 8 + line, rows - 1) * (K / 8) + quarter;

    float sums[PARTS][TILES][4] = {};
    uint4 ahead[PIECES][PARTS][2];
    #pragma unroll
    for (int i = 0; i < PIECES; i++)
      #pragma unroll
      for (int p = 0; p < PARTS; p++)
        #pragma unroll
        for (int h = 0; h < 2; h++)
          if (slice < chunks) ahead[i][p][h] = __ldcs(weights[p][h] + (slice * PIECES + i) * 4);
    for (int chunk = slice; chunk < chunks; chunk += SLICES) {
      #pragma unroll
      for (int i = 0; i < PIECES; i++) {
        const int piece = (chunk * PIECES + i) * 4;
        #pragma unroll
        for (int t = 0; t < TILES; t++) {
          const uint4 b = __ldg((const uint4*)x + inputs[t] + piece);
          #pragma unroll
          for (int p = 0; p < PARTS; p++) {
            const uint4 a0 = ahead[i][p][0], a1 = ahead[i][p][1];
            multiply(sums[p][t], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
            multiply(sums[p][t], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
          }
        }
        #pragma unroll
        for (int p = 0; p < PARTS; p++)
          #pragma unroll
          for (int h = 0; h < 2; h++)
            if (chunk + SLICES < chunks) ahead[i][p][h] = __ldcs(weights[p][h] + piece + SLICES * PIECES * 4);
      }
    }

    __shared__ float given[WARPS][TILES * 4][32];
    #pragma unroll
    for (int p = 0; p < PARTS; p++) {
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < TILES * 4; i++) given[warp][i][lane] = sums[p][i / 4][i % 4];
      __syncthreads();
      for (int i = slice; i < TILES * 4; i += SLICES) {
        float sum = 0.0f;
        #pragma unroll
        for (int s = 0; s < SLICES; s++) sum += given[warp - slice + s][i][lane];
        const int row = i / 4 * 8 + quarter * 2 + i % 2, output = first + p * 16 + i % 4 / 2 * 8 + line;
        if (row < rows && output < N) out[int64_t(row) * N + output] = T(sum);
      }
    }
"""


def reference(x: mx.array, weight: mx.array) -> mx.array:
    """x [..., inputs], weight [outputs, inputs] -> [..., outputs] in their dtype, summed up in float32."""
    return x @ weight.T


class Shape(NamedTuple):
    """Of a kernel, which is compiled when it is first met."""

    tiles: int  # of 8 rows
    parts: int  # of 16 outputs that a warp computes
    slices: int  # warps that share the inputs

    @property
    def outs(self) -> int:
        """Outputs of a block."""
        return 16 * self.parts * WARPS // self.slices


def shape(rows: int, outputs: int) -> Shape:
    """As many outputs to a block as leave blocks enough: all of x is read by each."""
    outs = 16
    while outs < 64 and outputs >= 2 * outs * BLOCKS:
        outs *= 2
    parts = min(outs // 16, 2)
    return Shape(-(-rows // 8), parts, 16 * parts * WARPS // outs)


@cache
def _kernel(dtype: mx.Dtype) -> Any:
    header = multiply(dtype)
    name = f"localllm_few_rows_{crc32((header + SOURCE).encode()):08x}"  # by which MLX finds it again
    return mx.fast.cuda_kernel(name, ["x", "w"], ["out"], SOURCE, header)


def fits(rows: int, weight: tuple[int, int], dtypes: tuple[mx.Dtype, mx.Dtype]) -> bool:
    """Whether the kernel computes these: how many rows, (outputs, inputs), the dtypes of x and weight."""
    outputs, inputs = weight
    return (
        1 < rows <= ROWS
        and outputs * inputs <= WEIGHT
        and inputs % CHUNK == 0
        and dtypes[0] == dtypes[1]
        and dtypes[0] in HALVES
    )


@lru_cache(4096)
def _call(
    rows: int, weight: tuple[int, int], dtypes: tuple[mx.Dtype, mx.Dtype]
) -> Callable[..., list[mx.array]] | None:
    """The kernel with all that these calls have in common; None where it does not compute them."""
    if not mx.cuda.is_available() or not fits(rows, weight, dtypes):
        return None
    outputs, _ = weight
    found = shape(rows, outputs)
    return partial(
        _kernel(dtypes[0]),
        template=[("T", dtypes[0]), *zip(("TILES", "PARTS", "SLICES"), found, strict=True)],
        grid=(THREADS * -(-outputs // found.outs), 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_dtypes=[dtypes[0]],
    )


def product(x: mx.array, weight: mx.array, turned: mx.array) -> mx.array:
    """See `reference`, which computes what does not fit; `turned` is the weight's transpose. Both begin at a multiple
    of 16 bytes, as whole rows of an array do."""
    *before, _ = x.shape
    call = _call(math.prod(before), weight.shape, (x.dtype, weight.dtype))
    if call is None:
        return x @ turned
    return call(inputs=[x, weight], output_shapes=[(*before, len(weight))])[0]
