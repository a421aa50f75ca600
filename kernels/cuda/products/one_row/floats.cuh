// The weight formats of one_row.cuh with bfloat16 activations that are not rounded: e4m3, int4 and MXFP4. A chunk is 64
// bytes of weights of one output. mma.sync multiplies 16 rows, which have activations of the same row: rows 0 to 7 those of
// one half of the inputs, rows 8 to 15 those of the other half. So its operand is what a lane reads from shared memory, and
// needs no zeros. The eight lanes with the same t have the same two outputs, and each lane owns one output of one chunk.
#pragma once

#include "../small_batch/formats.cuh"
#include "activations.cuh"

namespace localllm::cuda {

// The sums of the two outputs of a lane, 2 t and 2 t + 1. Elements 0 and 1 of an accumulator belong to rows 0 to 7 of the
// product, elements 2 and 3 to rows 8 to 15. `first` needs only the former, `second` only the latter.
struct Pair {
  float first[4] = {}, second[4] = {};

  // Adds the products of activations x[i] and weights w[i].
  __device__ void add(const uint32_t (&x)[4], const uint32_t (&w)[4]) {
    multiply_add(first, x[0], x[1], x[2], x[3], w[0], w[2]);
    multiply_add(second, x[0], x[1], x[2], x[3], w[1], w[3]);
  }
  // The output that the lane owns.
  template <class L>
  __device__ float owned(const L& lane) const {
    return lane.output < 4 ? first[0] + second[2] : first[1] + second[3];
  }
};

struct FloatFormat {
  using Group = float;  // the sum of the activations of a group
  static constexpr bool MMA = true, HAS_ROW_SCALE = false;
  static constexpr int X_BYTES = 2, RECORD_BYTES = 4;
};

// e4m3 (E4m3 in small_batch/formats.cuh). GROUPED: a scale for each group of inputs, a power of two of chunks;
// otherwise for each output.
template <bool GROUPED>
struct E4m3Row : FloatFormat {
  using Sum = float;
  // Without groups, the lanes with part 0 have the sum of all chunks.
  using Partial = std::conditional_t<GROUPED, float, Pair>;
  static constexpr bool HAS_OUTPUT_SCALE = !GROUPED;
  static constexpr int CHUNK = 64, GROUPS = GROUPED ? 1 : 0, GROUP = 0;
  // In every four inputs, the odd ones come first.
  static __device__ uint4 ordered(const uint4& x) {
    return {__byte_perm(x.x, x.y, 0x7632), __byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x7632),
            __byte_perm(x.z, x.w, 0x5410)};
  }

  template <class L, class S>
  static __device__ void multiply(const L& lane, int chunks, int chunk, const S& stage, uint32_t x, const float*,
                                  Partial& sum) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (chunk + j >= chunks) return;
      const uint32_t from = x + (chunk + j) * CHUNK * X_BYTES + lane.t * 32;
      Pair product;
      if constexpr (!GROUPED) product = sum;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t values[4], w[4];
        load_vector(from + 16 * h, values);
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = E4m3<GROUPED>::widen(stage.weights[j][2 * h + i / 2] << i % 2 * 8);
        product.add(values, w);
      }
      if constexpr (!GROUPED) sum = product;
      else if (lane.part == j) sum += product.owned(lane) * __uint_as_float(stage.records[0]);
    }
  }
  template <class L>
  static __device__ float sum_of(const Partial& partial, const L& lane) {
    if constexpr (GROUPED) return partial;
    else return lane.part == 0 ? partial.owned(lane) : 0.0f;
  }
};

// int4 (Nibbles<true, PER_CHUNK> in small_batch/formats.cuh), with PER_CHUNK groups per chunk.
template <int PER_CHUNK>
struct WideHalfBytes : FloatFormat, PlainSum<float> {
  using Format = Nibbles<true, PER_CHUNK>;
  static constexpr bool HAS_OUTPUT_SCALE = false;
  static constexpr int CHUNK = 128, GROUPS = PER_CHUNK, GROUP = 128 / PER_CHUNK;
  // The order in which a word of nibbles is unpacked: inputs 0 and 4, 1 and 5, 2 and 6, 3 and 7.
  static __device__ uint4 ordered(const uint4& x) {
    return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
            __byte_perm(x.y, x.w, 0x7632)};
  }

  template <class L, class S>
  static __device__ void multiply(const L& lane, int chunks, int chunk, const S& stage, uint32_t x, const float* groups,
                                  float& sum) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (chunk + j >= chunks) return;
      Pair products[PER_CHUNK];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        uint32_t values[4], w[4];
        load_vector(x + ((chunk + j) * CHUNK + r * 32 + lane.t * 8) * X_BYTES, values);
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = (stage.weights[j][r] >> 4 * i & 0x000f000fu) | 0x43004300u;
        products[r * PER_CHUNK / 4].add(values, w);
      }
      if (lane.part != j) continue;
#pragma unroll
      for (int p = 0; p < PER_CHUNK; p++) {
        const uint32_t record = stage.records[p];
        const float surplus = Format::surplus_of(record) * groups[(chunk + j) * PER_CHUNK + p];
        sum = __fmaf_rn(products[p].owned(lane) - surplus, Format::scale_of(record), sum);
      }
    }
  }
};

// MXFP4, not packed (kernels/ops/linear_mxfp4.py). The 16 bytes of a lane are a group: lane t has group t of a chunk.
// Rows g and 8 + g of the activations have only the inputs of group g % 4. So mma.sync adds up each group alone, and
// each lane owns one output of the group `part` of each chunk: it multiplies the sum by the power of two of the group.
// 2^-127 is read as 0.
struct Mxfp4Row : FloatFormat, PlainSum<float> {
  static constexpr bool HAS_OUTPUT_SCALE = false;
  static constexpr int CHUNK = 128, GROUPS = 4, GROUP = 0, RECORD_BYTES = 1;
  static __device__ uint4 ordered(const uint4& x) { return WideHalfBytes<1>::ordered(x); }

  // Converts numbers i and i + 4 of a word from e2m1 to bf16, exactly. The integer product has two copies of each
  // number. One has the sign, the other the exponent and the mantissa of a bf16 number that is smaller by a factor of
  // 2^126.
  static __device__ uint32_t widen(uint32_t word, int i) {
    word >>= i / 2 * 8;
    const uint32_t copies = i % 2 ? (word & 0x00f000f0u) * 0x0104u : (word & 0x000f000fu) * 0x1040u;
    return multiplied(copies & 0x81c081c0u, 0x7e807e80u);
  }

  template <class L, class S>
  static __device__ void multiply(const L& lane, int chunks, int chunk, const S& stage, uint32_t x, const float*,
                                  float& sum) {
    uint32_t values[4][4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (chunk + j >= chunks) return;
      if (lane.part == lane.t) {
#pragma unroll
        for (int k = 0; k < 4; k++)
          load_vector(x + ((chunk + j) * CHUNK + lane.t * 32 + k * 8) * X_BYTES, values[k]);
      }
      Pair product;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = widen(stage.weights[j][k], i);
        product.add(values[k], w);
      }
      sum = __fmaf_rn(product.owned(lane), __uint_as_float(stage.records[j] << 23), sum);
    }
  }
};

}  // namespace localllm::cuda
