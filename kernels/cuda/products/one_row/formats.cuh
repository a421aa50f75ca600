// The weight formats of products of one row. A chunk is 64 bytes of weights of one output; it is multiplied with the
// int8 activations of the same inputs. Sums of integers are exact in any order.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../product.h"

namespace localllm::cuda {

// A group of activations with one scale: the scale, and the sum of the int8 values.
struct Rounded {
  float scale;
  int sum;
};

static __device__ inline void load_vector(uint32_t from, uint32_t (&to)[4]) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

static __device__ inline uint32_t load_record(uint32_t from) {
  uint32_t record;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(record) : "r"(from));
  return record;
}

static __device__ inline Rounded load_rounded(uint32_t from) {
  Rounded group;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=f"(group.scale), "=r"(group.sum) : "r"(from));
  return group;
}

// sum + the dot product of four unsigned bytes and four signed bytes.
static __device__ inline int dot_unsigned(uint32_t weights, uint32_t x, int sum) {
  asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(weights), "r"(x));
  return sum;
}

// The addresses in shared memory that a lane of hopper.cu reads for one chunk.
struct Chunk {
  uint32_t weights, x;
  uint32_t records, groups;  // addresses for the first group; the next groups follow at 32 and 8 bytes
  int last;                 // index of the last group that exists; the last chunk may have fewer groups
};

// Formats whose lanes have the sum of a tile at its end.
template <class T>
struct PlainSum {
  using Sum = T;
  using Partial = T;
  template <class L>
  static __device__ T sum_of(T partial, const L&) {
    return partial;
  }
};

// int8, [out_features, in_features]; one scale for all activations of the row.
struct Bytes : PlainSum<int> {
  using Group = Rounded;
  static constexpr bool MMA = false, HAS_ROW_SCALE = true, HAS_OUTPUT_SCALE = true;
  static constexpr int CHUNK = 64, X_BYTES = 1, GROUPS = 0, GROUP = 0, RECORD_BYTES = 4;
  static __device__ void put(char* x, int k, uint2 bytes) { *reinterpret_cast<uint2*>(x + k) = bytes; }

  static __device__ int multiply(const uint32_t (&weights)[4], const uint32_t (&x)[4], int sum) {
#pragma unroll
    for (int e = 0; e < 4; e++) sum = __dp4a(int(weights[e]), int(x[e]), sum);
    return sum;
  }

  // Adds the products of a step of one_row.cuh to `sum`. x: address of the activations.
  template <class L, class S>
  static __device__ void multiply(const L& lane, int chunks, int chunk, const S& stage, uint32_t x, const Rounded*,
                                  int& sum) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t values[4];
      load_vector(x + min(chunk + j, chunks - 1) * CHUNK + lane.t * 16, values);
      sum = multiply(stage.weights[j], values, sum);
    }
  }
};

// Lane t of the four lanes of an output gets the sum of their values[t].
static __device__ inline int exchange(const int (&values)[4], int t) {
  int pair[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int sent = t & 2 ? values[j] : values[2 + j];
    pair[j] = (t & 2 ? values[2 + j] : values[j]) + __shfl_xor_sync(0xffffffffu, sent, 2);
  }
  const int sent = t & 1 ? pair[0] : pair[1];
  return (t & 1 ? pair[1] : pair[0]) + __shfl_xor_sync(0xffffffffu, sent, 1);
}

// int4 with int8 activations in groups, PER_CHUNK groups per chunk. Layout: see Nibbles in small_batch/formats.cuh.
template <int PER_CHUNK>
struct HalfBytes : PlainSum<float> {
  using Group = Rounded;
  static constexpr bool MMA = false, HAS_ROW_SCALE = false, HAS_OUTPUT_SCALE = false;
  static constexpr int CHUNK = 128, X_BYTES = 1, GROUPS = PER_CHUNK, GROUP = 128 / PER_CHUNK, RECORD_BYTES = 4;

  // Stores 8 activations. The activations that a lane multiplies with 16 bytes of weights are contiguous. In each group
  // of 8 activations, those of even inputs come first.
  static __device__ void put(char* x, int k, uint2 bytes) {
    int offset = (k & ~127) | (k % 32 / 8) * 32 | (k % 128 / 32) * 8;
    *reinterpret_cast<uint2*>(x + offset) = {__byte_perm(bytes.x, bytes.y, 0x6420),
                                             __byte_perm(bytes.x, bytes.y, 0x7531)};
  }

  // Multiplies 16 bytes of weights with 32 activations of `put`. High nibbles are multiplied without a shift, so the
  // sums `odd` are 16 times as large.
  static __device__ void multiply(const uint32_t (&weights)[4], uint32_t x_address, int (&even)[PER_CHUNK],
                                  int (&odd)[PER_CHUNK]) {
    uint32_t x[2][4];
    load_vector(x_address, x[0]);
    load_vector(x_address + 16, x[1]);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int p = r * PER_CHUNK / 4;
      even[p] = dot_unsigned(weights[r] & 0x0f0f0f0fu, x[r / 2][r % 2 * 2], even[p]);
      odd[p] = dot_unsigned(weights[r] & 0xf0f0f0f0u, x[r / 2][r % 2 * 2 + 1], odd[p]);
    }
  }

  // Adds the product of a group to `sum`, with the float arithmetic of small_batch/kernel.cuh. `integers`: the product
  // without zero points.
  static __device__ void add(float& sum, int integers, uint32_t record, const Rounded& group) {
    float scale = __half2float(__ushort_as_half((unsigned short)record));
    sum = __fmaf_rn(float(integers - int(record >> 16) * group.sum), scale * group.scale, sum);
  }

  // Adds the products of a step of one_row.cuh to `sum`. x: address of the activations; `groups`: their scales and sums.
  template <class L, class S>
  static __device__ void multiply(const L& lane, int chunks, int chunk, const S& stage, uint32_t x,
                                  const Rounded* groups, float& sum) {
    int values[PER_CHUNK][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int even[PER_CHUNK] = {}, odd[PER_CHUNK] = {};
      multiply(stage.weights[j], x + min(chunk + j, chunks - 1) * CHUNK + lane.t * 32, even, odd);
#pragma unroll
      for (int p = 0; p < PER_CHUNK; p++) values[p][j] = even[p] + (odd[p] >> 4);
    }
    int integers[PER_CHUNK];
#pragma unroll
    for (int p = 0; p < PER_CHUNK; p++) integers[p] = exchange(values[p], lane.t);
    const int own = chunk + lane.part;
    if (own >= chunks) return;
#pragma unroll
    for (int p = 0; p < PER_CHUNK; p++) add(sum, integers[p], stage.records[p], groups[own * PER_CHUNK + p]);
  }

  // Adds the products of a chunk of hopper.cu to `sum`.
  static __device__ void multiply(float& sum, const Chunk& chunk) {
    int even[PER_CHUNK] = {}, odd[PER_CHUNK] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t weights[4];
      load_vector(chunk.weights + 16 * i, weights);
      multiply(weights, chunk.x + 32 * i, even, odd);
    }
#pragma unroll
    for (int p = 0; p < PER_CHUNK; p++)
      add(sum, even[p] + (odd[p] >> 4), load_record(chunk.records + min(p, chunk.last) * 32),
          load_rounded(chunk.groups + p * 8));
  }
};

}  // namespace localllm::cuda
