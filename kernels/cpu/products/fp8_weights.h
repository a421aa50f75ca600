// 8-bit float weights (e4m3) with float activations, a weight format for expand.h.
#pragma once

#include "expand.h"

namespace localllm::VARIANT {
namespace {

// An e4m3 number has the bit layout of a half (f16), but an exponent bias of 7 in place of 15. Shifted into a half, its
// value is too small by a factor of 2^8, also for subnormals. NaN would become a number, so the loader refuses NaN.
constexpr float BIAS_FACTOR = 0x1p8f;

// Weights of WIDTH outputs for an even and an odd input, not yet multiplied by BIAS_FACTOR.
struct Pair { F32 even, odd; };

#if defined(__AVX512F__)
__m256i halves(__m256i upper_bytes) {
  __m256i rest = _mm256_and_si256(_mm256_srli_epi16(upper_bytes, 1), _mm256_set1_epi16(0x3f80));
  return _mm256_or_si256(rest, _mm256_and_si256(upper_bytes, _mm256_set1_epi16((short)0x8000)));
}
Pair load_pair(const uint8_t* from) {
  __m256i both = _mm256_loadu_si256((const __m256i*)from);
  return {{_mm512_cvtph_ps(halves(_mm256_slli_epi16(both, 8)))}, {_mm512_cvtph_ps(halves(both))}};
}
#elif defined(__AVX2__)
__m128i halves(__m128i upper_bytes) {
  __m128i rest = _mm_and_si128(_mm_srli_epi16(upper_bytes, 1), _mm_set1_epi16(0x3f80));
  return _mm_or_si128(rest, _mm_and_si128(upper_bytes, _mm_set1_epi16((short)0x8000)));
}
Pair load_pair(const uint8_t* from) {
  __m128i both = _mm_loadu_si128((const __m128i*)from);
  return {{_mm256_cvtph_ps(halves(_mm_slli_epi16(both, 8)))}, {_mm256_cvtph_ps(halves(both))}};
}
#else
F32 from_byte(I32 byte) {  // 2^112 corrects the exponent bias from f16 to float; BIAS_FACTOR is applied later
  return as_float((byte & broadcast(0x7f)) << 20 | (byte & broadcast(0x80)) << 24) * set1(0x1p112f);
}
Pair load_pair(const uint8_t* from) {
  I32 both;
  for (int i = 0; i < WIDTH; i++) both.v[i] = from[2 * i] | from[2 * i + 1] << 8;
  return {from_byte(both), from_byte(both >> 8)};
}
#endif

struct E4m3 {
  static constexpr Format format = Format::fp8;

  static void expand(const uint8_t* block, int64_t begin, int64_t end, float* out) {
    for (int j = 0; j < PANEL; j += WIDTH) {
      F32 scale = load((const float*)block + j) * set1(BIAS_FACTOR);
      const uint8_t* bytes = block + PANEL * 4 + begin * PANEL + j * 2;
      float* to = out + j;
      for (int64_t k = begin; k < end; k += 2, bytes += PANEL * 2, to += PANEL * 2) {
        Pair pair = load_pair(bytes);
        store(to, pair.even * scale);
        store(to + PANEL, pair.odd * scale);
      }
    }
  }

  template <int R>
  static void product(const uint8_t* block, int64_t inputs, const float* x, float* sums) {
    constexpr int V = 2;  // vectors of outputs at a time
    for (int j = 0; j < PANEL; j += V * WIDTH) {
      F32 acc[R][V][2];
      for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) acc[r][v][0] = acc[r][v][1] = zero();
      }
      const uint8_t* bytes = block + PANEL * 4 + j * 2;
      for (int64_t k = 0; k < inputs; k += 2, bytes += PANEL * 2) {
        prefetch_weights(bytes);
        for (int v = 0; v < V; v++) {
          Pair pair = load_pair(bytes + v * WIDTH * 2);
          for (int r = 0; r < R; r++) {
            acc[r][v][0] = fma(set1(x[k * R + r]), pair.even, acc[r][v][0]);
            acc[r][v][1] = fma(set1(x[(k + 1) * R + r]), pair.odd, acc[r][v][1]);
          }
        }
      }
      for (int v = 0; v < V; v++) {
        F32 scale = load((const float*)block + j + v * WIDTH);
        for (int r = 0; r < R; r++) {
          float* to = sums + r * PANEL + j + v * WIDTH;
          F32 sum = (acc[r][v][0] + acc[r][v][1]) * set1(BIAS_FACTOR);
          store(to, fma(sum, scale, load(to)));
        }
      }
    }
  }
};

}  // namespace
}  // namespace localllm::VARIANT
