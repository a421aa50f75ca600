// WIDTH vectors as a matrix, turned about its diagonal.
#pragma once

#include "vec.h"

namespace localllm::LANE {

#if defined(__AVX512F__)
static inline F32 low(F32 a, F32 b) { return {_mm512_unpacklo_ps(a.v, b.v)}; }  // within each 128 bits
static inline F32 high(F32 a, F32 b) { return {_mm512_unpackhi_ps(a.v, b.v)}; }
static inline F32 low_pairs(F32 a, F32 b) {
  return {_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a.v), _mm512_castps_pd(b.v)))};
}
static inline F32 high_pairs(F32 a, F32 b) {
  return {_mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a.v), _mm512_castps_pd(b.v)))};
}
static inline F32 even_quarters(F32 a, F32 b) { return {_mm512_shuffle_f32x4(a.v, b.v, 0x88)}; }
static inline F32 odd_quarters(F32 a, F32 b) { return {_mm512_shuffle_f32x4(a.v, b.v, 0xdd)}; }
#elif defined(__AVX2__)
static inline F32 low(F32 a, F32 b) { return {_mm256_unpacklo_ps(a.v, b.v)}; }
static inline F32 high(F32 a, F32 b) { return {_mm256_unpackhi_ps(a.v, b.v)}; }
static inline F32 low_pairs(F32 a, F32 b) {
  return {_mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a.v), _mm256_castps_pd(b.v)))};
}
static inline F32 high_pairs(F32 a, F32 b) {
  return {_mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a.v), _mm256_castps_pd(b.v)))};
}
#endif

static inline void transpose(F32 (&x)[WIDTH]) {
#if defined(__AVX2__)
  F32 y[WIDTH];
#pragma GCC unroll 4
  for (int i = 0; i < WIDTH; i += 4) {  // 4 by 4 within each 128 bits
    F32 a = low(x[i], x[i + 1]), b = high(x[i], x[i + 1]), c = low(x[i + 2], x[i + 3]), d = high(x[i + 2], x[i + 3]);
    y[i] = low_pairs(a, c), y[i + 1] = high_pairs(a, c), y[i + 2] = low_pairs(b, d), y[i + 3] = high_pairs(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
    F32 a = even_quarters(y[i], y[i + 4]), b = odd_quarters(y[i], y[i + 4]);
    F32 c = even_quarters(y[i + 8], y[i + 12]), d = odd_quarters(y[i + 8], y[i + 12]);
    x[i] = even_quarters(a, c), x[i + 4] = even_quarters(b, d);
    x[i + 8] = odd_quarters(a, c), x[i + 12] = odd_quarters(b, d);
#else
    x[i] = {_mm256_permute2f128_ps(y[i].v, y[i + 4].v, 0x20)};
    x[i + 4] = {_mm256_permute2f128_ps(y[i].v, y[i + 4].v, 0x31)};
#endif
  }
#else
  for (int i = 0; i < WIDTH; i++) {
    for (int j = 0; j < i; j++) {
      float kept = x[i].v[j];
      x[i].v[j] = x[j].v[i];
      x[j].v[i] = kept;
    }
  }
#endif
}

}  // namespace localllm::LANE
