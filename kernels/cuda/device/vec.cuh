// Vectorised loads and stores of up to 16 bytes, converted to and from float; block and warp sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <stdexcept>
#include <string>

#include "../kernels.h"

namespace localllm::cuda {

static __device__ inline float to_float(float x) { return x; }
static __device__ inline float to_float(__half x) { return __half2float(x); }
static __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
static __device__ inline void from_float(float x, float* out) { *out = x; }
static __device__ inline void from_float(float x, __half* out) { *out = __float2half_rn(x); }
static __device__ inline void from_float(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
// Values out of range become ±448.
static __device__ inline void from_float(float x, __nv_fp8_e4m3* out) {
  out->__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// Aligned to at most 16 bytes: the assembler of CUDA 12.8 has no wider loads, and tensors need no wider alignment.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T values[N];
};

// Elements of T in the widest load (16 bytes).
template <class T>
constexpr int WIDEST = 16 / sizeof(T);

template <int N, class T>
static __device__ inline void load(const T* from, float* to) {
  Vec<T, N> vec = *reinterpret_cast<const Vec<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; i++) to[i] = to_float(vec.values[i]);
}

template <int N, class T>
static __device__ inline void save(T* to, const float* from) {
  Vec<T, N> vec;
#pragma unroll
  for (int i = 0; i < N; i++) from_float(from[i], &vec.values[i]);
  *reinterpret_cast<Vec<T, N>*>(to) = vec;
}

// True if 16-byte loads are possible: all pointers and all distances (in bytes) are multiples of 16.
static inline bool aligned(std::initializer_list<const void*> pointers, std::initializer_list<int64_t> bytes) {
  for (const void* pointer : pointers)
    if (reinterpret_cast<uintptr_t>(pointer) % 16) return false;
  for (int64_t distance : bytes)
    if (distance % 16) return false;
  return true;
}

static inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Calls f with a value of the C++ type of `type`.
template <class F>
static inline void with_type(Type type, F&& f) {
  switch (type) {
    case Type::f32: return f(float{});
    case Type::bf16: return f(__nv_bfloat16{});
    case Type::f16: return f(__half{});
  }
}

static inline void check_launch(const char* name) {
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
}

constexpr int64_t MAX_GRID = 2147483647;

static __device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The sum over all threads of a block; every thread gets it. The block size is a multiple of 32.
static __device__ inline float sum_of_block(float x) {
  __shared__ float partials[32];
  x = sum_of_warp(x);
  __syncthreads();  // other warps may still read `partials` of the previous call
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = x;
  __syncthreads();
  return sum_of_warp(threadIdx.x % 32 < blockDim.x / 32 ? partials[threadIdx.x % 32] : 0.0f);
}

}  // namespace localllm::cuda
