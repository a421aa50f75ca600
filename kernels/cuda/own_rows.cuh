// The activations of a product of 1 to 8 rows. Every block prepares all rows in its shared memory: it optionally adds
// the residual stream and normalises, and stores bf16 or int8. For few rows this redundant work takes less time than
// the launch of a separate kernel.
#pragma once

#include "few_rows_plan.h"
#include "overlap.cuh"

namespace localllm::cuda {

struct FewRows {
  void* out;
  const void* x;         // [rows, x_stride] bf16, or int8 from round_rows.cu
  const uint8_t* weight;  // [outs, row_bytes]
  const uint32_t* records;  // [outs / 8][subs][8], scales and zero points (formats.cuh); null: none
  const float* scale;       // [outs]; null: none
  const float* row_scale;   // [rows], scales of int8 activations; null: none
  const float* sub_scale;   // [rows][subs], scales of groups of int8 activations; null: none
  const void* bias;         // [outs]; null: none
  Type out_type, bias_type;
  int rows, outs, ins;
  int subs, per_sub;  // subs: records per output; per_sub: chunks that one record covers (fp8)
  int64_t row_bytes, x_stride, out_stride;
  bool resident;  // true: no earlier kernel in the stream writes the weights, so they may be prefetched
  int gated;      // > 0: out [rows, gated] is gate(output i) * output (gated + i); 0: no gate
  Activation gate;
  int slots, slot_bytes;  // stages of the ring of a thread, and the bytes of a stage of all threads
  int tables;             // buffers for the partial sums of a tile: 1, or 2 to overlap tiles
  // Bytes of a row of prepared activations in shared memory. 0: activations are not prepared, they come through the
  // ring with the weights.
  int own_pitch;
  int group;           // inputs that share an activation scale
  const void* stream;  // residual stream [rows, ins] bf16, added to x before the norm; null: none
  void* stream_out;    // [rows, ins], x + stream; must not alias stream
  const void* norm;    // [ins]; null: no norm
  Type norm_type;
  float eps, offset;
};

static __device__ inline float number(const void* from, Type type, int64_t at) {
  if (type == Type::f32) return static_cast<const float*>(from)[at];
  if (type == Type::bf16) return to_float(static_cast<const __nv_bfloat16*>(from)[at]);
  return to_float(static_cast<const __half*>(from)[at]);
}

static __device__ inline void put(void* to, Type type, int64_t at, float value) {
  if (type == Type::f32) static_cast<float*>(to)[at] = value;
  else if (type == Type::bf16) from_float(value, static_cast<__nv_bfloat16*>(to) + at);
  else from_float(value, static_cast<__half*>(to) + at);
}

static __device__ inline float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

static __device__ inline float activated(Activation kind, float x) {
  if (kind == Activation::silu) return x / (1.0f + __expf(-x));
  if (kind == Activation::gelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

// Converts eight bf16 in 16 bytes to and from float.
static __device__ inline void unpack(const uint4& held, float (&values)[8]) {
  load<8>(reinterpret_cast<const __nv_bfloat16*>(&held), values);
}
static __device__ inline void pack(uint4& held, const float (&values)[8]) {
  save<8>(reinterpret_cast<__nv_bfloat16*>(&held), values);
}

// The bits of the largest magnitude, or of a NaN. The bits of positive floats have the order of their values.
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
    int whole = largest == 0.0f ? 0 : __float2int_rn(__fmul_rn(values[i], factor));
    words[i / 4] |= uint32_t(whole & 255) << 8 * (i % 4);
  }
  return {words[0], words[1]};
}

template <class F>
struct OwnRows {
  using X = typename F::X;
  const FewRows& a;
  char* x;           // [rows][own_pitch], zero-padded behind the last input
  float* row_scale;  // [rows]
  float* sub_scale;  // [rows][subs]

  __device__ OwnRows(const FewRows& a, char* memory) : a(a), x(memory) {
    row_scale = reinterpret_cast<float*>(memory + a.rows * a.own_pitch);
    sub_scale = row_scale + a.rows;
  }

  // All threads of the block call it. Each row has an equal number of threads, which keep its values in registers. The
  // values of a group are in one warp.
  __device__ void fill() const {
    int halvings = a.rows == 1 ? 0 : a.rows == 2 ? 1 : a.rows <= 4 ? 2 : 3, team = THREADS >> halvings;
    int row = threadIdx.x >> (LOG_THREADS - halvings), lane = threadIdx.x & (team - 1);
    bool real = row < a.rows;
    uint4 held[HELD];
#pragma unroll
    for (int h = 0; h < HELD; h++) held[h] = read(a.x, row * a.x_stride, (h * team + lane) * 8, real);
    if (a.norm) normalise(held, row, lane, team, real);
    float values[8];
    uint32_t largest = 0;
    if (sizeof(X) == 1 && !F::ROUNDED_IN_GROUPS) {
#pragma unroll
      for (int h = 0; h < HELD; h++) {
        unpack(held[h], values);
        largest = magnitude(values, largest);
      }
      largest = reduce_team(__reduce_max_sync(0xffffffffu, largest), team,
                            [](uint32_t x, uint32_t y) { return max(x, y); });
      if (real && lane == 0) row_scale[row] = __fdiv_rn(__uint_as_float(largest), 127.0f);
    }
#pragma unroll
    for (int h = 0; h < HELD; h++) {
      int k = (h * team + lane) * 8;
      if (F::ROUNDED_IN_GROUPS) {
        unpack(held[h], values);
        largest = magnitude(values, 0);
        for (int lanes = 1; lanes < a.group / 8; lanes *= 2)
          largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        if (real && k % a.group == 0 && k / a.group < a.subs)
          sub_scale[row * a.subs + k / a.group] = __fdiv_rn(__uint_as_float(largest), 127.0f);
      }
      char* to = x + row * a.own_pitch + k * int(sizeof(X));
      if (!real || (k + 8) * int(sizeof(X)) > a.own_pitch) continue;
      if constexpr (sizeof(X) == 1) {
        unpack(held[h], values);
        *reinterpret_cast<uint2*>(to) = rounded_to_int8(values, __uint_as_float(largest));
      } else {
        *reinterpret_cast<uint4*>(to) = held[h];
      }
    }
    __syncthreads();
  }

 private:
  __device__ uint4 read(const void* from, int64_t row, int k, bool real) const {
    if (!real || k >= a.ins) return {};
    return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + row + k);
  }
  // Reduces the results of the warps of a row, in a fixed order.
  template <class T, class Join>
  static __device__ T reduce_team(T own, int team, Join join) {
    __shared__ T parts[WARPS];
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
    __syncthreads();
    int first = (threadIdx.x & ~(team - 1)) / 32;
    T all = parts[first];
    for (int w = 1; w < team / 32; w++) all = join(all, parts[first + w]);
    return all;
  }
  __device__ void normalise(uint4 (&held)[HELD], int row, int lane, int team, bool real) const {
    float squares = 0.0f, values[8];
#pragma unroll
    for (int h = 0; h < HELD; h++) {
      int k = (h * team + lane) * 8;
      unpack(held[h], values);
      if (a.stream) {
        float before[8];
        uint4 read_before = read(a.stream, int64_t(row) * a.ins, k, real);
        unpack(read_before, before);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = rounded(values[i] + before[i]);
        pack(held[h], values);
        if (blockIdx.x == 0 && real && k < a.ins)
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.stream_out) + int64_t(row) * a.ins + k) = held[h];
      }
#pragma unroll
      for (int i = 0; i < 8; i++) squares += values[i] * values[i];
    }
    squares = reduce_team(sum_of_warp(squares), team, [](float x, float y) { return x + y; });
    float scale = rsqrtf(squares / a.ins + a.eps);
#pragma unroll
    for (int h = 0; h < HELD; h++) {
      int k = (h * team + lane) * 8;
      if (k >= a.ins) continue;
      unpack(held[h], values);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] *= scale * (number(a.norm, a.norm_type, k + i) + a.offset);
      pack(held[h], values);
    }
  }
};

}  // namespace localllm::cuda
