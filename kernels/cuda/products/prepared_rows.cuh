// The activations of a product of 1 to 8 rows. Every block prepares all rows in its shared memory: it optionally adds
// the residual stream and normalises, and stores bf16 or int8. For so few rows, the redundant work takes less time than
// the launch of a separate kernel.
#pragma once

#include "../lora/products.h"
#include "../device/overlap.cuh"
#include "small_batch/plan.h"

namespace localllm::cuda {

struct SmallBatch {
  void* out;
  const void* x;         // [rows, x_stride] bf16, or int8 from round_rows.cu
  const uint8_t* weight;    // [out_features, row_bytes]
  const uint32_t* records;  // [out_features / 8][subgroups][8] (small_batch/formats.cuh); null: none
  const float* scale;       // [out_features]; null: none
  const float* row_scale;   // [rows], scales of int8 activations; null: none
  const float* subgroup_scale;  // [rows][subgroups], scales of groups of int8 activations; null: none
  const void* bias;             // [out_features]; null: none
  Type out_type, bias_type;
  int rows, out_features, in_features;
  int subgroups, chunks_per_subgroup;  // scales per output; chunks with the same scale (fp8)
  int64_t row_bytes, x_stride, out_stride;
  bool resident;  // true: no earlier kernel in the stream writes the weights, so they may be prefetched
  int gated;      // > 0: out [rows, gated] is gate(output i) * output (gated + i); 0: no gate
  Activation gate;
  int slots, slot_bytes;  // stages of the ring; bytes of a stage, for all threads together
  int sum_buffers;        // buffers for the partial sums of a tile: 1, or 2 to overlap tiles
  // Bytes of a row of prepared activations in shared memory. 0: activations are not prepared, they come through the
  // ring with the weights.
  int prepared_pitch;
  int group;           // inputs that share an activation scale
  const void* stream;  // residual stream [rows, in_features] bf16, added to x before the norm; null: none
  void* stream_out;    // [rows, in_features], x + stream; must not alias stream
  const void* norm;    // [in_features]; null: no norm
  Type norm_type;
  float eps, offset;
  LoraTerm lora;  // inner null: no LoRA product
};

static __device__ inline float number(const void* from, Type type, int64_t index) {
  if (type == Type::f32) return static_cast<const float*>(from)[index];
  if (type == Type::bf16) return to_float(static_cast<const __nv_bfloat16*>(from)[index]);
  return to_float(static_cast<const __half*>(from)[index]);
}

static __device__ inline void put(void* to, Type type, int64_t index, float value) {
  if (type == Type::f32) static_cast<float*>(to)[index] = value;
  else if (type == Type::bf16) from_float(value, static_cast<__nv_bfloat16*>(to) + index);
  else from_float(value, static_cast<__half*>(to) + index);
}

static __device__ inline float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

static __device__ inline float activated(Activation kind, float x) {
  if (kind == Activation::silu) return x / (1.0f + __expf(-x));
  if (kind == Activation::gelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

// Converts eight bf16 in 16 bytes to and from float.
static __device__ inline void unpack(const uint4& vectors, float (&values)[8]) {
  load<8>(reinterpret_cast<const __nv_bfloat16*>(&vectors), values);
}
static __device__ inline void pack(uint4& vectors, const float (&values)[8]) {
  save<8>(reinterpret_cast<__nv_bfloat16*>(&vectors), values);
}

// The bits of the largest magnitude of `values` and `largest`, or the bits of a NaN. The bits of positive floats have
// the order of their values.
static __device__ inline uint32_t magnitude(const float (&values)[8], uint32_t largest) {
#pragma unroll
  for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(fabsf(values[i])));
  return largest;
}

// Eight int8: round(x * (127 / largest)), ties to even (kernels/ops/linear_int8.py).
static __device__ inline uint2 rounded_to_int8(const float (&values)[8], float largest) {
  float factor = __fdiv_rn(127.0f, largest);
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int integer = largest == 0.0f ? 0 : __float2int_rn(__fmul_rn(values[i], factor));
    words[i / 4] |= uint32_t(integer & 255) << 8 * (i % 4);
  }
  return {words[0], words[1]};
}

template <class F>
struct PreparedRows {
  using X = typename F::X;
  const SmallBatch& a;
  char* x;           // [rows][prepared_pitch], zero-padded after the last input
  float* row_scale;  // [rows]
  float* subgroup_scale;  // [rows][subgroups]

  __device__ PreparedRows(const SmallBatch& a, char* memory) : a(a), x(memory) {
    row_scale = reinterpret_cast<float*>(memory + a.rows * a.prepared_pitch);
    subgroup_scale = row_scale + a.rows;
  }

  // All threads of the block call it. Each row has an equal number of threads, which keep its values in registers. The
  // values of a group are in one warp.
  __device__ void fill() const {
    int halvings = a.rows == 1 ? 0 : a.rows == 2 ? 1 : a.rows <= 4 ? 2 : 3, team = THREADS >> halvings;
    int row = threadIdx.x >> (LOG_THREADS - halvings), lane = threadIdx.x & (team - 1);
    bool valid = row < a.rows;
    uint4 vectors[VECTORS_PER_THREAD];
#pragma unroll
    for (int h = 0; h < VECTORS_PER_THREAD; h++) vectors[h] = read(a.x, row * a.x_stride, (h * team + lane) * 8, valid);
    if (a.norm) normalise(vectors, row, lane, team, valid);
    float values[8];
    uint32_t largest = 0;
    if (sizeof(X) == 1 && !F::ROUNDED_IN_GROUPS) {
#pragma unroll
      for (int h = 0; h < VECTORS_PER_THREAD; h++) {
        unpack(vectors[h], values);
        largest = magnitude(values, largest);
      }
      largest = reduce_team(__reduce_max_sync(0xffffffffu, largest), team,
                            [](uint32_t x, uint32_t y) { return max(x, y); });
      if (valid && lane == 0) row_scale[row] = __fdiv_rn(__uint_as_float(largest), 127.0f);
    }
#pragma unroll
    for (int h = 0; h < VECTORS_PER_THREAD; h++) {
      int k = (h * team + lane) * 8;
      if (F::ROUNDED_IN_GROUPS) {
        unpack(vectors[h], values);
        largest = magnitude(values, 0);
        for (int lanes = 1; lanes < a.group / 8; lanes *= 2)
          largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        if (valid && k % a.group == 0 && k / a.group < a.subgroups)
          subgroup_scale[row * a.subgroups + k / a.group] = __fdiv_rn(__uint_as_float(largest), 127.0f);
      }
      char* to = x + row * a.prepared_pitch + k * int(sizeof(X));
      if (!valid || (k + 8) * int(sizeof(X)) > a.prepared_pitch) continue;
      if constexpr (sizeof(X) == 1) {
        unpack(vectors[h], values);
        *reinterpret_cast<uint2*>(to) = rounded_to_int8(values, __uint_as_float(largest));
      } else {
        *reinterpret_cast<uint4*>(to) = vectors[h];
      }
    }
    __syncthreads();
  }

 private:
  __device__ uint4 read(const void* from, int64_t row, int k, bool valid) const {
    if (!valid || k >= a.in_features) return {};
    return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + row + k);
  }
  // Reduces the results of the warps of a row, in a fixed order.
  template <class T, class Join>
  static __device__ T reduce_team(T value, int team, Join join) {
    __shared__ T partials[WARPS];
    if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = value;
    __syncthreads();
    int first = (threadIdx.x & ~(team - 1)) / 32;
    T total = partials[first];
    for (int w = 1; w < team / 32; w++) total = join(total, partials[first + w]);
    return total;
  }
  __device__ void normalise(uint4 (&vectors)[VECTORS_PER_THREAD], int row, int lane, int team, bool valid) const {
    float squares = 0.0f, values[8];
#pragma unroll
    for (int h = 0; h < VECTORS_PER_THREAD; h++) {
      int k = (h * team + lane) * 8;
      unpack(vectors[h], values);
      if (a.stream) {
        float before[8];
        uint4 read_before = read(a.stream, int64_t(row) * a.in_features, k, valid);
        unpack(read_before, before);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = rounded(values[i] + before[i]);
        pack(vectors[h], values);
        if (blockIdx.x == 0 && valid && k < a.in_features)
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.stream_out) + int64_t(row) * a.in_features + k) =
              vectors[h];
      }
#pragma unroll
      for (int i = 0; i < 8; i++) squares += values[i] * values[i];
    }
    squares = reduce_team(sum_of_warp(squares), team, [](float x, float y) { return x + y; });
    float scale = rsqrtf(squares / a.in_features + a.eps);
#pragma unroll
    for (int h = 0; h < VECTORS_PER_THREAD; h++) {
      int k = (h * team + lane) * 8;
      if (k >= a.in_features) continue;
      unpack(vectors[h], values);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] *= scale * (number(a.norm, a.norm_type, k + i) + a.offset);
      pack(vectors[h], values);
    }
  }
};

}  // namespace localllm::cuda
