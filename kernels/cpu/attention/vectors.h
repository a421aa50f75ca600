// Vectors of 4-byte lanes for attention. A lane has one float (E = float) or two consecutive bf16 (E = bf16, on
// hardware with bf16 dot products). In both cases the products are summed in float.
//
// A block is 2 * WIDTH consecutive dimensions of a head, stored as type C. Loads permute the dimensions of a block to
// save instructions ("block order"); at the end, natural_order() restores the order of the sums.
#pragma once

#include "../vectors/row.h"
#include "../vectors/transpose.h"

namespace localllm::VARIANT {

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

template <class E>
constexpr int STEP = 4 / sizeof(E);  // elements per lane

constexpr int BLOCK = 2 * WIDTH;  // dimensions per block

template <class E>
constexpr int BLOCK_VECTORS = 2 / STEP<E>;  // vectors per block of a query or key

// Per lane: sum + a · b.
template <class E>
static inline F32 dot(F32 sum, F32 a, F32 b) {
#if defined(__AVX512BF16__)
  if constexpr (same<E, bf16>) return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
#endif
  return fma(a, b, sum);
}

// Loads the elements of a block into BLOCK_VECTORS vectors. The types E and C determine the order of the elements in
// the vectors (the block order).
template <class E, class C>
static inline void load_block(const C* p, F32 (&x)[BLOCK_VECTORS<E>]) {
  if constexpr (same<E, bf16>) {
    x[0] = load((const float*)p);
    return;
  } else if constexpr (same<C, bf16>) {
#if defined(__AVX512F__)
    __m512i pairs = _mm512_loadu_si512(p);
    x[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    x[1] = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)))};
    return;
#elif defined(__AVX2__)
    __m256i pairs = _mm256_loadu_si256((const __m256i*)p);
    x[0] = {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))};
    x[1] = {_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)))};
    return;
#endif
  }
  if constexpr (!same<E, bf16>) {
    x[0] = load(p);
    x[1] = load(p + WIDTH);
  }
}

// Loads the first n elements of a block; the rest is zero.
template <class E, class C>
static inline void load_block(const C* p, int64_t n, F32 (&x)[BLOCK_VECTORS<E>]) {
  alignas(64) C first[BLOCK];
#if defined(__AVX512BW__)
  if constexpr (sizeof(C) == 2) {
    _mm512_store_si512(first, _mm512_maskz_loadu_epi16((1u << n) - 1, p));
  } else
#endif
  {
    memset(first, 0, sizeof first);
    memcpy(first, p, n * sizeof(C));
  }
  load_block<E>(first, x);
}

template <class E, class C>
static inline void load_block(const C* p, Full, F32 (&x)[BLOCK_VECTORS<E>]) { load_block<E>(p, x); }

// Loads WIDTH lanes in natural order: `left` > 0 elements from p, then zeros.
template <class E, class C>
static inline F32 load_lanes(const C* p, int64_t left) {
  if constexpr (same<E, bf16>) {
    F32 x[1];
    left < BLOCK ? load_block<E>(p, left, x) : load_block<E>(p, x);
    return x[0];
  } else {
    return left < WIDTH ? load(p, (int)left) : load(p);
  }
}

// Loads a block of dimensions of the V vectors of STEP keys into x. Each lane of x has one dimension of the V vectors
// of these keys.
template <class E, class C, class Count>
static inline void load_values(const C* const* keys, int64_t offset, Count n, F32 (&x)[2]) {
#if defined(__AVX512BF16__)
  if constexpr (same<E, bf16>) {
    F32 even[1], odd[1];
    load_block<E>(keys[0] + offset, n, even);
    load_block<E>(keys[1] + offset, n, odd);
    __m512i a = _mm512_castps_si512(even[0].v), b = _mm512_castps_si512(odd[0].v);
    x[0] = {_mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b))};
    x[1] = {_mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b))};
    return;
  }
#endif
  if constexpr (!same<E, bf16>) load_block<E>(keys[0] + offset, n, x);
}

// The dimension that load_values() stores at index i of a block (block order).
template <class E, class C>
constexpr int dimension_at(int i) {
  if (same<E, bf16>) return i % WIDTH / 4 * 8 + i / WIDTH * 4 + i % 4;
#if defined(__AVX2__)
  if (same<C, bf16>) return i % WIDTH * 2 + i / WIDTH;
#endif
  return i;
}

// Permutes sums from block order to natural order.
template <class E, class C>
static inline void natural_order(float* x, int64_t blocks) {
  for (float* block = x; block < x + blocks * BLOCK; block += BLOCK) {
    float permuted[BLOCK];
    for (int i = 0; i < BLOCK; i++) permuted[dimension_at<E, C>(i)] = block[i];
    memcpy(block, permuted, sizeof permuted);
  }
}

// Permutes queries from natural order to block order, the order of the keys that load_block() loads.
template <class E, class C>
static inline void block_order(float* x, int64_t blocks) {
  static_assert(same<E, float>);
  for (float* block = x; block < x + blocks * BLOCK; block += BLOCK) {
    float permuted[BLOCK];
    for (int i = 0; i < BLOCK; i++) permuted[i] = block[dimension_at<E, C>(i)];
    memcpy(block, permuted, sizeof permuted);
  }
}

// out[i] = the sum of all lanes of x[i].
static inline void add_across(const F32 (&x)[8], float* out) {
#if defined(__AVX2__)
  __m256 y[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
#if defined(__AVX512F__)
    y[i] = _mm256_add_ps(_mm512_castps512_ps256(x[i].v), _mm512_extractf32x8_ps(x[i].v, 1));
#else
    y[i] = x[i].v;
#endif
  }
  __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
  __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
  __m256 near = _mm256_blend_ps(low, high, 0xf0), far = _mm256_permute2f128_ps(low, high, 0x21);
  _mm256_storeu_ps(out, _mm256_add_ps(near, far));
#else
  for (int i = 0; i < 8; i++) out[i] = sum(x[i]);
#endif
}

// Calls body(i, n) for every block of [0, end). n is Full, or an element count for a shorter last block.
template <class Body>
static inline void each_block(int64_t end, Body body) {
  int64_t i = 0;
  for (; i + BLOCK <= end; i += BLOCK) body(i, Full());
  if (i < end) body(i, end - i);
}

}  // namespace localllm::VARIANT
