"""Products of few rows, whose weights are read once.

MLX asks cuBLAS for a plan each time it multiplies more than one row: for a step of a small model that takes longer than
all else (backends/mlx/projections.py has figures). The plan is what this saves. Kernels alone, in CUDA graphs on an
H200 (2026-11-22: 13 weights of 1000 x 1024 to 151936 x 4096 bfloat16 that take turns, 2 to 16 rows): cuBLAS' take 0.97
to 4.3 times as long as these, which read weights of 32 MiB and more at 65 to 96 % of what reading alone reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx

from .tensor_cores import HALVES, available, multiply

WARPS, THREADS = 8, 256  # of a block
ROWS = 16  # most; beyond, cuBLAS' kernels are worth their plan
CHUNK = 32  # inputs that a warp multiplies at once
PARTS = (1, 2, 3)  # with 4, no product was faster by 1 %
PROCESSORS = 132  # of an H100 or H200, which share the blocks
SHARED = 96 * 2**10  # bytes of a block: two find room on a multiprocessor of these, one on those with 100 KiB

COPY = """
__device__ inline void copy_async(uint4* to, const uint4* from) {
  const uint32_t shared = __cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
__device__ inline void end_of_slot() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ inline void await_slots() {  // all but the last ones are there
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
"""

# A block has 16 PARTS outputs; its warps share the inputs, a chunk each by turns, and are summed up at the end. Tensor
# cores take weights as their first factor and rows as their second. Which input is multiplied in which place of a tile
# does not matter as long as both agree, so a thread takes 16 bytes that lie together:
#
#   lane = 4 line + quarter     weights: outputs line and line + 8 of 16, 8 inputs of 32 from 8 quarter on
#                               x: row line of 8, the same inputs
#                               sums: rows 2 quarter and 2 quarter + 1, outputs line and line + 8
#
# What a thread multiplies it has copied itself, into its own places of SLOTS in shared memory: all but one of them are
# always on their way, x as early as the weights, and no warp waits for another.
SOURCE = """
    constexpr int WARPS = 8, THREADS = 32 * WARPS, OUTS = 16 * PARTS, COPIES = 2 * PARTS + TILES;
    const int N = w_shape[0], K = w_shape[1], chunks = K / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = lane % 4, line = lane / 4;
    const int first = blockIdx.x * OUTS;
    int rows = 1;
    for (int i = 0; i < x_ndim - 1; i++) rows *= x_shape[i];

    const uint4* weights[PARTS][2];
    #pragma unroll
    for (int p = 0; p < PARTS; p++)
      #pragma unroll
      for (int h = 0; h < 2; h++)
        weights[p][h] = (const uint4*)(w + int64_t(min(first + p * 16 + h * 8 + line, N - 1)) * K) + quarter;
    const uint4* inputs = (const uint4*)(x + line * K) + quarter;

    extern __shared__ uint4 shared[];  // [SLOTS][COPIES][THREADS], then the sums
    uint4* own = shared + threadIdx.x;
    auto fetch = [&](int chunk, int slot) {
      if (chunk < chunks) {
        uint4* to = own + slot * COPIES * THREADS;
        #pragma unroll
        for (int p = 0; p < PARTS; p++)
          #pragma unroll
          for (int h = 0; h < 2; h++) copy_async(to + (p * 2 + h) * THREADS, weights[p][h] + chunk * 4);
        #pragma unroll
        for (int t = 0; t < TILES; t++)  // rows that there are not have sums of their own, which nobody reads
          if (t * 8 + line < rows) copy_async(to + (2 * PARTS + t) * THREADS, inputs + t * K + chunk * 4);
      }
      end_of_slot();
    };
    #pragma unroll
    for (int slot = 0; slot < SLOTS - 1; slot++) fetch(warp + slot * WARPS, slot);

    float sums[PARTS][TILES][4] = {};
    int slot = 0, free = SLOTS - 1;
    #pragma unroll 1
    for (int chunk = warp; chunk < chunks; chunk += WARPS) {
      fetch(chunk + (SLOTS - 1) * WARPS, free);
      await_slots<SLOTS - 1>();
      const uint4* from = own + slot * COPIES * THREADS;
      uint4 b[TILES];
      #pragma unroll
      for (int t = 0; t < TILES; t++) b[t] = from[(2 * PARTS + t) * THREADS];
      #pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const uint4 a0 = from[p * 2 * THREADS], a1 = from[(p * 2 + 1) * THREADS];
        #pragma unroll
        for (int t = 0; t < TILES; t++) {
          multiply(sums[p][t], a0.x, a1.x, a0.y, a1.y, b[t].x, b[t].y);
          multiply(sums[p][t], a0.z, a1.z, a0.w, a1.w, b[t].z, b[t].w);
        }
      }
      free = slot;
      slot = slot + 1 == SLOTS ? 0 : slot + 1;
    }

    float* given = (float*)shared + lane;  // [WARPS][PARTS * TILES * 4][32]
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < PARTS * TILES * 4; i++)
      given[(warp * PARTS * TILES * 4 + i) * 32] = sums[i / (TILES * 4)][i / 4 % TILES][i % 4];
    __syncthreads();
    for (int i = warp; i < PARTS * TILES * 4; i += WARPS) {
      float sum = 0.0f;
      #pragma unroll
      for (int s = 0; s < WARPS; s++) sum += given[(s * PARTS * TILES * 4 + i) * 32];
      const int row = i / 4 % TILES * 8 + quarter * 2 + i % 2;
      const int output = first + i / (TILES * 4) * 16 + i % 4 / 2 * 8 + line;
      if (row < rows && output < N) out[int64_t(row) * N + output] = T(sum);
    }
"""


def reference(x: mx.array, weight: mx.array) -> mx.array:
    """x [..., inputs], weight [outputs, inputs] -> [..., outputs] in their dtype, summed up in float32."""
    return x @ weight.T


class Shape(NamedTuple):
    """Of a kernel, which is compiled when it is first met."""

    tiles: int  # of 8 rows
    parts: int  # of 16 outputs that a block computes

    @property
    def slots(self) -> int:
        """Of a chunk each: as many as find room."""
        return SHARED // (16 * THREADS * (2 * self.parts + self.tiles))


def shape(rows: int, outputs: int) -> Shape:
    """The more outputs a block has, the less often x is read, as long as the multiprocessors share them well."""

    def most(parts: int) -> int:
        """Outputs, in parts, of the multiprocessor that has most of them."""
        return -(-outputs // (16 * parts * PROCESSORS)) * parts

    least = min(map(most, PARTS))
    return Shape(-(-rows // 8), max(parts for parts in PARTS if 5 * most(parts) <= 6 * least))


@cache
def _kernel(dtype: mx.Dtype) -> Any:
    header = multiply(dtype) + COPY
    name = f"localllm_few_rows_{crc32((header + SOURCE).encode()):08x}"  # by which MLX finds it again
    return mx.fast.cuda_kernel(name, ["x", "w"], ["out"], SOURCE, header, shared_memory=SHARED)


def fits(rows: int, inputs: int, dtypes: tuple[mx.Dtype, mx.Dtype]) -> bool:
    """Whether the kernel computes these: how many rows and inputs, the dtypes of x and weight."""
    return 1 < rows <= ROWS and inputs % CHUNK == 0 and dtypes[0] == dtypes[1] and dtypes[0] in HALVES


@lru_cache(4096)
def _call(
    rows: int, weight: tuple[int, int], dtypes: tuple[mx.Dtype, mx.Dtype]
) -> Callable[..., list[mx.array]] | None:
    """The kernel with all that these calls have in common; None where it does not compute them."""
    outputs, inputs = weight
    if not available() or not fits(rows, inputs, dtypes):
        return None
    found = shape(rows, outputs)
    return partial(
        _kernel(dtypes[0]),
        template=[("T", dtypes[0]), ("TILES", found.tiles), ("PARTS", found.parts), ("SLOTS", found.slots)],
        grid=(THREADS * -(-outputs // (16 * found.parts)), 1, 1),
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
