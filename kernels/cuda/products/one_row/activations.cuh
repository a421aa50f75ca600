// The activations of one row. Every block prepares them in its shared memory: it optionally adds the residual stream
// and normalises, then rounds to int8 (kernels/ops/linear_int8.py) or puts them in the order of the format.
#pragma once

#include "formats.cuh"
#include "../prepared_rows.cuh"

namespace localllm::cuda {

constexpr int TEAMS = 2, TEAM_WARPS = 4;  // warps that multiply; hopper.cu has a producer warp as well
constexpr int CONSUMER_THREADS = TEAMS * TEAM_WARPS * 32;  // threads of the consumer warps
constexpr int MAX_IN_FEATURES = 16384, MAX_NORMED_FEATURES = 8192;  // limits of `in_features` without and with a norm
constexpr int MAX_VECTORS = MAX_IN_FEATURES / 8 / CONSUMER_THREADS;  // of 8 activations per thread

static __device__ inline void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMER_THREADS) : "memory"); }

// F: weight format. N: vectors of 8 activations per thread. There are no branches between the N loads, so that they
// overlap; the time of this function is latency.
template <class F, int N>
class OneRow {
 public:
  using Group = typename F::Group;
  char* x;        // [padded] int8, or bf16 if the format does not round; zero-padded after the last input
  Group* groups;  // [padded / F::GROUP]; without groups: [1] if the activations are rounded, else none

  // Starts the loads of the norm's weights. It may run before wait_for_previous, because no kernel writes them.
  __device__ OneRow(const ProductArgs& a, char* x, int padded)
      : x(x), groups(reinterpret_cast<Group*>(x + padded * F::X_BYTES)), a_(a), padded_(padded) {
    if constexpr (EARLY_NORM)
      if (a.norm)
#pragma unroll
        for (int h = 0; h < N; h++) norm_[h] = read(a.norm, offset_of(h));
  }

  // All threads of the consumer warps call it.
  __device__ void fill() const {
    uint4 vectors[N];
#pragma unroll
    for (int h = 0; h < N; h++) vectors[h] = read(a_.x, offset_of(h));
    if constexpr (NORMED) {
      if (a_.stream) add_stream(vectors);
      if (a_.norm) normalise(vectors);
    }
    if constexpr (std::is_same_v<Group, Rounded>) round(vectors);
    else store(vectors);
    sync_consumers();
  }

 private:
  static constexpr bool NORMED = N * 8 * CONSUMER_THREADS <= MAX_NORMED_FEATURES;
  static constexpr bool EARLY_NORM = NORMED && (N < 4 || F::GROUPS < 4);  // the other kernels lack the registers
  const ProductArgs& a_;
  int padded_;
  uint4 norm_[EARLY_NORM ? N : 1];

  __device__ void round(const uint4 (&vectors)[N]) const {
    uint32_t largest[N];
#pragma unroll
    for (int h = 0; h < N; h++) largest[h] = magnitude(vectors[h]);
    if constexpr (F::GROUP > 0) {
#pragma unroll
      for (int lanes = 1; lanes < F::GROUP / 8; lanes *= 2)
#pragma unroll
        for (int h = 0; h < N; h++) largest[h] = max(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], lanes));
    } else {
#pragma unroll
      for (int h = 1; h < N; h++) largest[0] = max(largest[0], largest[h]);
      largest[0] = reduce(__reduce_max_sync(0xffffffffu, largest[0]),
                          [](uint32_t one, uint32_t pair) { return max(one, pair); });
      if (threadIdx.x == 0) groups[0] = {scale_of(__uint_as_float(largest[0])), 0};
    }
#pragma unroll
    for (int h = 0; h < N; h++)
      round_and_store(vectors[h], offset_of(h), __uint_as_float(largest[F::GROUP > 0 ? h : 0]));
  }
  // Stores the activations and the sums of their groups.
  __device__ void store(const uint4 (&vectors)[N]) const {
#pragma unroll
    for (int h = 0; h < N; h++) {
      const int k = offset_of(h);
      if constexpr (F::GROUP > 0) {
        float values[8], sum = 0.0f;
        unpack(vectors[h], values);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += values[i];
#pragma unroll
        for (int lanes = 1; lanes < F::GROUP / 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (k % F::GROUP == 0 && k < padded_) groups[k / F::GROUP] = sum;
      }
      if (k < padded_) *reinterpret_cast<uint4*>(x + k * F::X_BYTES) = F::ordered(vectors[h]);
    }
  }

  static __device__ int offset_of(int h) { return (h * CONSUMER_THREADS + int(threadIdx.x)) * 8; }
  __device__ uint4 read(const void* from, int k) const {
    if (k >= int(a_.in_features)) return {};
    return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + k);
  }
  // The bits of the largest magnitude of 8 values, or of a NaN. The bits of positive floats have the order of their
  // values.
  static __device__ uint32_t magnitude(const uint4& vectors) {
    constexpr uint32_t positive = 0x7fff7fffu;
    uint32_t pair = __vmaxu2(__vmaxu2(vectors.x & positive, vectors.y & positive),
                             __vmaxu2(vectors.z & positive, vectors.w & positive));
    return max(pair << 16, pair & 0xffff0000u);
  }
  // Reduces the results of the consumer warps, in a fixed order.
  template <class T, class Join>
  static __device__ T reduce(T value, Join join) {
    __shared__ T partials[CONSUMER_THREADS / 32];
    if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = value;
    sync_consumers();
    T total = partials[0];
#pragma unroll 4
    for (int w = 1; w < CONSUMER_THREADS / 32; w++) total = join(total, partials[w]);
    return total;
  }
  __device__ void add_stream(uint4 (&vectors)[N]) const {
    uint4 before[N];
    float values[8], stream_values[8];
#pragma unroll
    for (int h = 0; h < N; h++) before[h] = read(a_.stream, offset_of(h));
#pragma unroll
    for (int h = 0; h < N; h++) {
      unpack(vectors[h], values);
      unpack(before[h], stream_values);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] += stream_values[i];
      pack(vectors[h], values);
      if (blockIdx.x == 0 && offset_of(h) < int(a_.in_features))
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a_.stream_out) + offset_of(h)) = vectors[h];
    }
  }
  __device__ void normalise(uint4 (&vectors)[N]) const {
    float squares = 0.0f, values[8], weights[8];
#pragma unroll
    for (int h = 0; h < N; h++) {
      unpack(vectors[h], values);
#pragma unroll
      for (int i = 0; i < 8; i++) squares += values[i] * values[i];
    }
    squares = reduce(sum_of_warp(squares), [](float one, float pair) { return one + pair; });
    float scale = rsqrtf(squares / int(a_.in_features) + a_.eps);
#pragma unroll
    for (int h = 0; h < N; h++) {
      unpack(EARLY_NORM ? norm_[h] : read(a_.norm, offset_of(h)), weights);
      unpack(vectors[h], values);
#pragma unroll
      for (int i = 0; i < 8; i++) values[i] *= scale * (weights[i] + a_.offset);
      pack(vectors[h], values);
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
    uint32_t integers[8];
#pragma unroll
    for (int i = 0; i < 8; i++) integers[i] = __float_as_uint(__fadd_rn(__fmul_rn(values[i], factor), 12582912.0f));
    auto word = [&](int i) {
      return __byte_perm(__byte_perm(integers[i], integers[i + 1], 0x0040),
                         __byte_perm(integers[i + 2], integers[i + 3], 0x0040), 0x5410);
    };
    return {word(0), word(4)};
  }
  // Rounds and stores 8 activations. `largest`: largest magnitude of their group or row.
  __device__ void round_and_store(const uint4& vectors, int k, float largest) const {
    float values[8];
    unpack(vectors, values);
    uint2 integers = rounded_to_bytes(values, largest);
    if constexpr (F::GROUP > 0) {
      int sum = __dp4a(int(integers.x), 0x01010101, __dp4a(int(integers.y), 0x01010101, 0));
#pragma unroll
      for (int lanes = 1; lanes < F::GROUP / 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      if (k % F::GROUP == 0 && k < padded_) groups[k / F::GROUP] = {scale_of(largest), sum};
    }
    if (k < padded_) F::put(x, k, integers);
  }
};

}  // namespace localllm::cuda
