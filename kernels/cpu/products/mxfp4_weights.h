// MXFP4 weights (e2m1 with a power of two per 32 inputs) with float activations, a weight format for expand.h.
#pragma once

#include "expand.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t MXFP4_BLOCK_BYTES = PANEL + 32 * PANEL / 2;  // of 32 inputs of a panel

alignas(64) constexpr float E2M1_VALUES[16] = {0,   0.5f,  1,   1.5f,  2,   3,   4,   6,
                                               -0.f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// The values of e2m1 numbers in the lowest 4 bits of each element.
static inline F32 e2m1(I32 numbers) {
#if defined(__AVX512F__)
  return {_mm512_permutexvar_ps(numbers.v, _mm512_load_ps(E2M1_VALUES))};
#elif defined(__AVX2__)
  __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_load_ps(E2M1_VALUES), numbers.v);
  return {_mm256_or_ps(magnitude, as_float((numbers & broadcast(8)) << 28).v)};
#else
  F32 values;
  for (int i = 0; i < WIDTH; i++) values.v[i] = E2M1_VALUES[numbers.v[i] & 15];
  return values;
#endif
}

// The powers of two with these exponents (e8m0). 2^-127 becomes zero.
static inline F32 e8m0(const uint8_t* exponents) { return power_of_two(load_bytes(exponents) - set1(127.0f)); }

struct Mxfp4 {
  static constexpr Format format = Format::mxfp4;

  static void expand(const uint8_t* block, int64_t begin, int64_t end, float* out) {
    for (int j = 0; j < 16; j += WIDTH) {
      for (int half = 0; half < 2; half++) {
        F32 scale = e8m0(block + half * 16 + j);
        const uint8_t* numbers = block + PANEL + begin / 4 * 64 + j * 4;
        float* to = out + half * 16 + j;
        for (int64_t k = begin; k < end; k += 4, numbers += 64, to += 4 * PANEL) {
          I32 bytes = load_words(numbers) >> 4 * half;
          for (int i = 0; i < 4; i++) store(to + i * PANEL, e2m1(bytes >> 8 * i) * scale);
        }
      }
    }
  }

  template <int R>
  static void product(const uint8_t* block, int64_t inputs, const float* x, float* sums) {
    for (int j = 0; j < 16; j += WIDTH) {
      F32 acc[R][2][2];  // two independent sums per output, which hide the latency of additions
      for (int r = 0; r < R; r++) acc[r][0][0] = acc[r][0][1] = acc[r][1][0] = acc[r][1][1] = zero();
      const uint8_t* numbers = block + PANEL + j * 4;
      for (int64_t k = 0; k < inputs; k += 4, numbers += 64) {
        prefetch_weights(numbers);
        I32 bytes = load_words(numbers);
#pragma GCC unroll 4  // without it, GCC unrolls the loop too late and does not keep the sums in registers
        for (int i = 0; i < 4; i++) {
          F32 low = e2m1(bytes >> 8 * i), high = e2m1(bytes >> (8 * i + 4));
          for (int r = 0; r < R; r++) {
            F32 value = set1(x[(k + i) * R + r]);
            acc[r][0][i % 2] = fma(value, low, acc[r][0][i % 2]);
            acc[r][1][i % 2] = fma(value, high, acc[r][1][i % 2]);
          }
        }
      }
      for (int half = 0; half < 2; half++) {
        int column = half * 16 + j;
        F32 scale = e8m0(block + column);
        for (int r = 0; r < R; r++) {
          float* to = sums + r * PANEL + column;
          store(to, fma(acc[r][half][0] + acc[r][half][1], scale, load(to)));
        }
      }
    }
  }
};

}  // namespace
}  // namespace localllm::VARIANT
