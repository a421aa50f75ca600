// A tile of a product: a few rows of x times a panel of weights, with the sums in registers.
//
// Every sum adds the inputs in the same order for any number of rows. So the outputs of a row are bitwise the same
// alone, in a batch, and with any number of workers.
#pragma once

#include "../vectors/prefetch.h"
#include "../vectors/vec.h"

namespace localllm::VARIANT {
namespace {

constexpr int VECTORS = PANEL / WIDTH;  // vectors per row of a panel

// Maximum number of rows of a tile, and of vectors of sums that fit in the registers beside weights and x.
#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 12, MAX_SUM_VECTORS = 24;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int MAX_TILE_ROWS = 5, MAX_SUM_VECTORS = 10;
#else
constexpr int MAX_TILE_ROWS = 4, MAX_SUM_VECTORS = 4;
#endif

// sum + x * weight. The assembler keeps the sum in its register; otherwise the compiler moves sums and spills them.
static inline F32 multiply_add(F32 sum, F32 x, F32 weight) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum.v) : "x"(x.v), "x"(weight.v));
  return sum;
#else
  return fma(x, weight, sum);
#endif
}

// A policy class (Singles, Pairs, Dots) defines the steps in which a tile reads a panel. A step covers INPUTS inputs
// and has SUBSTEPS substeps. A substep has one element of x per row and one vector of weights per vector of outputs.
struct Singles {  // f32 weights [in_features][32]
  using X = float;
  using Weight = float;
  static constexpr int INPUTS = 1, SUBSTEPS = 1;
  static inline F32 weights(const float* panel, int vector, int) { return load(panel + vector * WIDTH); }
  static inline F32 broadcast(const float* x) { return set1(*x); }
  static inline F32 add(F32 sum, F32 x, F32 weight) { return multiply_add(sum, x, weight); }
};

// The even or odd elements of 2 * WIDTH 16-bit elements, as float.
#if defined(__AVX512F__)
static inline F32 every_other(const bf16* p, int odd) {
  __m512i pairs = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(odd ? _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000))
                                  : _mm512_slli_epi32(pairs, 16))};
}
static inline F32 every_other(const f16* p, int odd) {
  __m512i pairs = _mm512_loadu_si512(p);
  return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(odd ? _mm512_srli_epi32(pairs, 16) : pairs))};
}
#elif defined(__AVX2__)
static inline F32 every_other(const bf16* p, int odd) {
  __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
  return {_mm256_castsi256_ps(odd ? _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000))
                                  : _mm256_slli_epi32(pairs, 16))};
}
static inline F32 every_other(const f16* p, int odd) {
  __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
  __m256i order = _mm256_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0, 15, 14, 11, 10, 7, 6, 3, 2, 13,
                                  12, 9, 8, 5, 4, 1, 0);
  pairs = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(pairs, order), 0xd8);  // even elements, then odd elements
  return {_mm256_cvtph_ps(odd ? _mm256_extracti128_si256(pairs, 1) : _mm256_castsi256_si128(pairs))};
}
#else
template <class T>
static inline F32 every_other(const T* p, int odd) {
  F32 out;
  for (int i = 0; i < WIDTH; i++) out.v[i] = to_float(p[2 * i + odd]);
  return out;
}
#endif

template <class Half>
struct Pairs {  // bf16 or f16 weights [in_features / 2][32][2], converted to float in registers
  using X = float;
  using Weight = Half;
  static constexpr int INPUTS = 2, SUBSTEPS = 2;
  static inline F32 weights(const Half* panel, int vector, int substep) {
    return every_other(panel + vector * 2 * WIDTH, substep);
  }
  static inline F32 broadcast(const float* x) { return set1(*x); }
  static inline F32 add(F32 sum, F32 x, F32 weight) { return multiply_add(sum, x, weight); }
};

#if defined(__AVX512BF16__)
struct Dots {  // bf16 weights and activations, dot products of two inputs with float sums
  using X = uint32_t;  // two bf16
  using Weight = bf16;
  static constexpr int INPUTS = 2, SUBSTEPS = 1;
  static inline __m512i weights(const bf16* panel, int vector, int) {
    return _mm512_loadu_si512(panel + vector * 2 * WIDTH);
  }
  static inline __m512i broadcast(const uint32_t* x) {
    uint32_t pair;
    memcpy(&pair, x, 4);  // x may be unaligned: a row of bf16 can start at any even address
    return _mm512_set1_epi32(pair);
  }
  static inline F32 add(F32 sum, __m512i x, __m512i weight) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)x, (__m512bh)weight)};
  }
};
#endif

// sums [ROWS, 32] += x [steps, SUBSTEPS, ROWS] × panel, for OUT_VECTORS vectors of outputs from `vector` on. If
// `from_zero`, the sums start from zero.
template <class P, int ROWS, int OUT_VECTORS>
static inline void tile(const typename P::X* x, const typename P::Weight* panel, int64_t steps, float* sums, int vector,
                        bool from_zero, Prefetch prefetch) {
  F32 acc[ROWS][OUT_VECTORS];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 4
    for (int i = 0; i < OUT_VECTORS; i++)
      acc[row][i] = from_zero ? zero() : load(sums + row * PANEL + (vector + i) * WIDTH);
  }
  for (int64_t step = 0; step < steps; step++) {
#pragma GCC unroll 2
    for (int line = 0; line < OUT_VECTORS * WIDTH; line += 16) __builtin_prefetch(prefetch.address + line * 4);
#pragma GCC unroll 2
    for (int substep = 0; substep < P::SUBSTEPS; substep++) {
      decltype(P::weights(panel, 0, 0)) weights[OUT_VECTORS];
#pragma GCC unroll 4
      for (int i = 0; i < OUT_VECTORS; i++) weights[i] = P::weights(panel, vector + i, substep);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) {
        auto value = P::broadcast(x + substep * ROWS + row);
#pragma GCC unroll 4
        for (int i = 0; i < OUT_VECTORS; i++) acc[row][i] = P::add(acc[row][i], value, weights[i]);
      }
    }
    x += P::SUBSTEPS * ROWS;
    panel += P::INPUTS * PANEL;
    prefetch.address += prefetch.step_bytes;
  }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 4
    for (int i = 0; i < OUT_VECTORS; i++) store(sums + row * PANEL + (vector + i) * WIDTH, acc[row][i]);
  }
}

// Number of vectors of outputs in a tile of `rows` rows, so that all sums fit in the registers.
constexpr int out_vectors_of(int rows) {
  int vectors = VECTORS;
  while (vectors * rows > MAX_SUM_VECTORS) vectors /= 2;
  return vectors;
}

}  // namespace
}  // namespace localllm::VARIANT
