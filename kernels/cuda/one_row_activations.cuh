// The activations of one row. Every block prepares them in its shared memory: it optionally adds the residual stream
// and normalises, then rounds to int8 (kernels/ops/linear_int8.py).
#pragma once

#include "one_row_formats.cuh"
#include "own_rows.cuh"

namespace localllm::cuda {

constexpr int TEAMS = 2, TEAM_WARPS = 4;          // consumer warps; there is one producer warp
constexpr int CONSUMER_THREADS = TEAMS * TEAM_WARPS * 32;  // threads of the consumer warps
constexpr int MOST_INS = 16384, MOST_NORMED = 8192;  // limits of `ins` without and with a norm

static __device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMER_THREADS) : "memory"); }

// F: weight format. N: vectors of 8 activations per thread. There are no branches between the N loads, so that they
// overlap; the time of this function is latency.
template <class F, int N>
class OneRow {
 public:
  char* x;         // [padded] int8, zero-padded behind the last input
  Rounded* parts;  // [padded / F::GROUP], or [1] without groups

  // Starts the loads of the norm's weights, which no kernel writes.
  __device__ OneRow(const ProductArgs& a, char* x, Rounded* parts, int padded)
      : x(x), parts(parts), a_(a), padded_(padded) {
    if constexpr (NORMED)
      if (a.norm)
#pragma unroll
        for (int h = 0; h < N; h++) norm_[h] = read(a.norm, place(h));
  }

  // All threads of the consumer warps call it.
  __device__ void fill() const {
    uint4 held[N];
#pragma unroll
    for (int h = 0; h < N; h++) held[h] = read(a_.x, place(h));
    if constexpr (NORMED) {
      if (a_.stream) add_stream(held);
      if (a_.norm) normalise(held);
    }
    uint32_t largest[N];
#pragma unroll
    for (int h = 0; h < N; h++) largest[h] = magnitude(held[h]);
    if constexpr (F::GROUP > 0) {
#pragma unroll
      for (int lanes = 1; lanes < F::GROUP / 8; lanes *= 2)
#pragma unroll
        for (int h = 0; h < N; h++) largest[h] = max(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], lanes));
    } else {
#pragma unroll
      for (int h = 1; h < N; h++) largest[0] = max(largest[0], largest[h]);
      largest[0] = reduce(__reduce_max_sync(0xffffffffu, largest[0]),
                              [](uint32_t one, uint32_t two) { return max(one, two); });
      if (threadIdx.x == 0) parts[0] = {scale_of(__uint_as_float(largest[0])), 0};
    }
#pragma unroll
    for (int h = 0; h < N; h++) round_and_store(held[h], place(h), __uint_as_float(largest[F::GROUP > 0 ? h : 0]));
    sync_consumers();
  }

 private:
  static constexpr bool NORMED = N * 8 * CONSUMER_THREADS <= MOST_NORMED;
  const ProductArgs& a_;
  int padded_;
  uint4 norm_[NORMED ? N : 1];

  static __device__ int place(int h) { return (h * CONSUMER_THREADS + int(threadIdx.x)) * 8; }
  __device__ uint4 read(const void* from, int k) const {
    if (k >= int(a_.ins)) return {};
    return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + k);
  }
  // The bits of the largest magnitude of 8 values, or of a NaN. The bits of positive floats have the order of their
  // values.
  static __device__ uint32_t magnitude(const uint4& held) {
    constexpr uint32_t positive = 0x7fff7fffu;
    uint32_t two = __vmaxu2(__vmaxu2(held.x & positive, held.y & positive),
                            __vmaxu2(held.z & positive, held.w & positive));
    return max(two << 16, two & 0xffff0000u);
  }
  // Reduces the results of the consumer warps, in a fixed order.
  template <class T, class Join>
  static __device__ T reduce(T own, Join join) {
    __shared__ T partials[CONSUMER_THREADS / 32];
    if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = own;
    sync_consumers();
    T all = partials[0];
#pragma unroll 4
    for (int w = 1; w < CONSUMER_THREADS / 32; w++) all = join(all, partials[w]);
    return all;
  }
  __device__ void add_stream(uint4 (&held)[N]) const {
    uint4 before[N];
    float values[8], more[8];
#pragma unroll
    for (int h = 0; h < N; h++) before[h] = read(a_.stream, place(h));
#pragma unroll
    for (int h = 0; h < N; h++) {
      unpack(held[h], values);
      unpack(before[h], more);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] += more[i];
      pack(held[h], values);
      if (blockIdx.x == 0 && place(h) < int(a_.ins))
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a_.stream_out) + place(h)) = held[h];
    }
  }
  __device__ void normalise(uint4 (&held)[N]) const {
    float squares = 0.0f, values[8], weights[8];
#pragma unroll
    for (int h = 0; h < N; h++) {
      unpack(held[h], values);
#pragma unroll
      for (int i = 0; i < 8; i++) squares += values[i] * values[i];
    }
    squares = reduce(sum_of_warp(squares), [](float one, float two) { return one + two; });
    float scale = rsqrtf(squares / int(a_.ins) + a_.eps);
#pragma unroll
    for (int h = 0; h < N; h++) {
      unpack(norm_[h], weights);
      unpack(held[h], values);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] *= scale * (weights[i] + a_.offset);
      pack(held[h], values);
    }
  }
  // If `largest` is infinite, the scale is NaN, and so are all outputs.
  static __device__ float scale_of(float largest) {
    return __fmaf_rn(largest, 0.0f, __fdiv_rn(largest, 127.0f));
  }
  // Same result as rounded_to_int8. The addition of 1.5 * 2^23 leaves the integer in the low bits; it is faster than a
  // conversion instruction.
  static __device__ uint2 rounded_to_bytes(const float (&values)[8], float largest) {
    const float factor = largest == 0.0f ? 0.0f : __fdiv_rn(127.0f, largest);
    uint32_t whole[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      whole[i] = __float_as_uint(__fadd_rn(__fmul_rn(values[i], factor), 12582912.0f));
    auto word = [&](int i) {
      return __byte_perm(__byte_perm(whole[i], whole[i + 1], 0x0040), __byte_perm(whole[i + 2], whole[i + 3], 0x0040),
                         0x5410);
    };
    return {word(0), word(4)};
  }
  // Rounds and stores 8 activations. `largest`: largest magnitude of their group or row.
  __device__ void round_and_store(const uint4& held, int k, float largest) const {
    float values[8];
    unpack(held, values);
    uint2 whole = rounded_to_bytes(values, largest);
    if constexpr (F::GROUP > 0) {
      int sum = __dp4a(int(whole.x), 0x01010101, __dp4a(int(whole.y), 0x01010101, 0));
#pragma unroll
      for (int lanes = 1; lanes < F::GROUP / 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      if (k % F::GROUP == 0 && k < padded_) parts[k / F::GROUP] = {scale_of(largest), sum};
    }
    if (k < padded_) F::put(x, k, whole);
  }
};

}  // namespace localllm::cuda
