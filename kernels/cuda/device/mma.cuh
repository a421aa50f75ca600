// Matrix products of a warp by mma.sync, and products of pairs.
#pragma once

#include <cstdint>

namespace localllm::cuda {

// c [16, 8] += a [16, 16] b [16, 8], in bf16 with float sums.
static __device__ inline void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c [16, 8] += a [16, 32] b [32, 8], in int8 with int32 sums.
static __device__ inline void multiply_add(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The products of two pairs of bf16. Subnormal numbers are exact.
static __device__ inline uint32_t multiplied(uint32_t pair, uint32_t factors) {
  uint32_t products;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(products) : "r"(pair), "r"(factors), "r"(0x80008000u));
  return products;
}

}  // namespace localllm::cuda
