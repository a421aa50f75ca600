"""Products on NVIDIA's tensor cores, by hand: one warp, tiles of 16 x 16 and 16 x 8."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

HALVES = (mx.float16, mx.bfloat16)

# A thread's parts of the tiles: PTX, "Matrix Fragments for mma.m16n8k16".
SOURCE = """
__device__ inline void multiply(
    float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""


@cache
def available() -> bool:
    """Whether MLX computes on a GPU that has them, and copies to shared memory by itself: since Ampere."""
    return mx.cuda.is_available() and int(mx.device_info()["compute_capability_major"]) >= 8


def multiply(dtype: mx.Dtype) -> str:
    """The header of a kernel that calls `multiply`: adds a product of halves of `dtype` to float32 sums."""
    return SOURCE.replace("KIND", "bf16" if dtype == mx.bfloat16 else "f16")
