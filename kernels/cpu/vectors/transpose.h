// Transposes a matrix of WIDTH vectors. Used to rearrange rows of activations into steps of a product.
#pragma once

#include "vec.h"

namespace localllm::VARIANT {

#if defined(__AVX512F__)
// These functions interleave the low or high elements (or pairs of elements) of a and b within each 128 bits.
static inline F32 low(F32 a, F32 b) { return {_mm512_unpacklo_ps(a.v, b.v)}; }
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

#if defined(__AVX2__)
// Transposes a 4 × 4 matrix within each 128 bits of x[0] … x[3].
static inline void transpose_quads(const F32* x, F32* out) {
  F32 a = low(x[0], x[1]), b = high(x[0], x[1]), c = low(x[2], x[3]), d = high(x[2], x[3]);
  out[0] = low_pairs(a, c);
  out[1] = high_pairs(a, c);
  out[2] = low_pairs(b, d);
  out[3] = high_pairs(b, d);
}

// A vector with four elements of each of the rows 0, 4, 8, … (WIDTH / 4 rows). `stride`: elements from row to row.
static inline F32 every_fourth_row(const float* p, int64_t stride) {
#if defined(__AVX512F__)
  __m512 quads = _mm512_castps128_ps512(_mm_loadu_ps(p));
  quads = _mm512_insertf32x4(quads, _mm_loadu_ps(p + 4 * stride), 1);
  quads = _mm512_insertf32x4(quads, _mm_loadu_ps(p + 8 * stride), 2);
  return {_mm512_insertf32x4(quads, _mm_loadu_ps(p + 12 * stride), 3)};
#else
  return {_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4 * stride), 1)};
#endif
}
#endif

static inline void transpose(F32 (&x)[WIDTH]) {
#if defined(__AVX2__)
  F32 y[WIDTH];
#pragma GCC unroll 4
  for (int i = 0; i < WIDTH; i += 4) transpose_quads(x + i, y + i);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
    F32 a = even_quarters(y[i], y[i + 4]), b = odd_quarters(y[i], y[i + 4]);
    F32 c = even_quarters(y[i + 8], y[i + 12]), d = odd_quarters(y[i + 8], y[i + 12]);
    x[i] = even_quarters(a, c);
    x[i + 4] = even_quarters(b, d);
    x[i + 8] = odd_quarters(a, c);
    x[i + 12] = odd_quarters(b, d);
#else
    x[i] = {_mm256_permute2f128_ps(y[i].v, y[i + 4].v, 0x20)};
    x[i + 4] = {_mm256_permute2f128_ps(y[i].v, y[i + 4].v, 0x31)};
#endif
  }
#else
  for (int i = 0; i < WIDTH; i++) {
    for (int j = 0; j < i; j++) {
      float element = x[i].v[j];
      x[i].v[j] = x[j].v[i];
      x[j].v[i] = element;
    }
  }
#endif
}

// Stores the first n elements and does not write beyond them.
static inline void store_first(float* out, F32 x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(out, (1u << n) - 1, x.v);
#elif defined(__AVX2__)
  if (n == WIDTH) return store(out, x);
  __m128 rest = _mm256_castps256_ps128(x.v);
  if (n & 4) {
    _mm_storeu_ps(out, rest);
    out += 4;
    rest = _mm256_extractf128_ps(x.v, 1);
  }
  if (n & 2) {
    _mm_storel_pi((__m64*)out, rest);
    out += 2;
    rest = _mm_movehl_ps(rest, rest);
  }
  if (n & 1) _mm_store_ss(out, rest);
#else
  float values[WIDTH];
  store(values, x);
  memcpy(out, values, n * sizeof(float));
#endif
}

// Transposes `count` rows of WIDTH elements; row(i) returns row i. Stores out [steps, count] for the first `steps`
// elements of each row.
template <class Row>
static inline void store_transposed(int count, int64_t steps, float* out, Row row) {
  if (steps > WIDTH) steps = WIDTH;
  if (count == 1) return store_first(out, row(0), (int)steps);
  F32 block[WIDTH];
  for (int i = 0; i < WIDTH; i++) block[i] = i < count ? row(i) : zero();
  transpose(block);
  for (int64_t step = 0; step < steps; step++) store_first(out + step * count, block[step], count);
}

}  // namespace localllm::VARIANT
