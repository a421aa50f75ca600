// Parts that the attention kernels with mma.sync share: the product, operands of 16 bits, and the conversion of an fp8
// cache.
#pragma once

#include "../device/overlap.cuh"

namespace localllm::cuda {
namespace {

constexpr unsigned ALL = 0xffffffff;
constexpr float LOG2_E = 1.4426950408889634f;

// sum [16, 8] += a [16, 16] b [16, 8], with float sums.
template <class T>
__device__ inline void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1);
template <>
__device__ inline void multiply<__nv_bfloat16>(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply<__half>(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                        uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <class T>
__device__ inline uint32_t pair(float low, float high);
template <>
__device__ inline uint32_t pair<__nv_bfloat16>(float low, float high) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}
template <>
__device__ inline uint32_t pair<__half>(float low, float high) {
  __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}

// The type of the operands of mma.sync. Float8_e4m3 becomes float16, which is exact.
template <class C>
struct Operand {
  using Type = C;
};
template <>
struct Operand<__nv_fp8_e4m3> {
  using Type = __half;
};

// Converts the two float8_e4m3 values of the low 16 bits to float16.
__device__ inline uint32_t widen_two(uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
  uint32_t both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(uint16_t(bytes)));
  return both;
#else
  // The bits of a value, shifted to the fields of a float16, are the value / 256, also for subnormal values. Only the
  // NaN of float8 becomes a number above 448, the largest value.
  uint32_t spread = __byte_perm(bytes, 0, 0x1404);
  uint32_t bits = (spread & 0x80008000) | (spread & 0x7f007f00) >> 1;
  __half2 both = __hmul2(*reinterpret_cast<__half2*>(&bits), __float2half2_rn(256.f));
  return *reinterpret_cast<uint32_t*>(&both) | __hgt2_mask(__habs2(both), __float2half2_rn(448.f));
#endif
}

// Converts 8 elements of a query to the type H of the operands.
template <class T, class H>
__device__ inline uint4 convert_query(uint4 query) {
  if constexpr (std::is_same_v<T, H>) {
    return query;
  } else {
    const T* eight = reinterpret_cast<const T*>(&query);
    auto two = [&](int i) { return pair<H>(to_float(eight[i]), to_float(eight[i + 1])); };
    return make_uint4(two(0), two(2), two(4), two(6));
  }
}

}  // namespace
}  // namespace localllm::cuda
