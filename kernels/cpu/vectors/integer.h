// Vectors of int32, and the byte dot products that each ISA variant computes fastest.
#pragma once

#include "vec.h"

namespace localllm::VARIANT {

// The value that is added to int8 activations when they are stored, because the byte dot product needs one unsigned
// operand. 0 if dot_signed does not need it.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int SHIFT = 128;
#else
constexpr int SHIFT = 0;
#endif

#if defined(__AVX512F__)

struct I32 { __m512i v; };
static inline I32 zeros() { return {_mm512_setzero_si512()}; }
static inline I32 load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_words(void* p, I32 x) { _mm512_storeu_si512(p, x.v); }
static inline I32 broadcast_word(const void* p) {  // copies the four bytes at p to all elements
  int32_t bytes;
  memcpy(&bytes, p, 4);
  return {_mm512_set1_epi32(bytes)};
}
static inline I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline I32 operator|(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
static inline I32 operator^(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
static inline I32 operator>>(I32 a, int bits) { return {_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(bits))}; }
static inline I32 operator<<(I32 a, int bits) { return {_mm512_sll_epi32(a.v, _mm_cvtsi32_si128(bits))}; }
static inline I32 broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline F32 to_float(I32 x) { return {_mm512_cvtepi32_ps(x.v)}; }
static inline F32 as_float(I32 x) { return {_mm512_castsi512_ps(x.v)}; }
static inline F32 load_bytes(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
static inline void store_bytes(int8_t* p, F32 integers) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(integers.v)));
}

#elif defined(__AVX2__)

struct I32 { __m256i v; };
static inline I32 zeros() { return {_mm256_setzero_si256()}; }
static inline I32 load_words(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
static inline void store_words(void* p, I32 x) { _mm256_storeu_si256((__m256i*)p, x.v); }
static inline I32 broadcast_word(const void* p) {
  int32_t bytes;
  memcpy(&bytes, p, 4);
  return {_mm256_set1_epi32(bytes)};
}
static inline I32 operator+(I32 a, I32 b) { return {_mm256_add_epi32(a.v, b.v)}; }
static inline I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
static inline I32 operator&(I32 a, I32 b) { return {_mm256_and_si256(a.v, b.v)}; }
static inline I32 operator|(I32 a, I32 b) { return {_mm256_or_si256(a.v, b.v)}; }
static inline I32 operator^(I32 a, I32 b) { return {_mm256_xor_si256(a.v, b.v)}; }
static inline I32 operator>>(I32 a, int bits) { return {_mm256_srl_epi32(a.v, _mm_cvtsi32_si128(bits))}; }
static inline I32 operator<<(I32 a, int bits) { return {_mm256_sll_epi32(a.v, _mm_cvtsi32_si128(bits))}; }
static inline I32 broadcast(int32_t x) { return {_mm256_set1_epi32(x)}; }
static inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.v)}; }
static inline F32 as_float(I32 x) { return {_mm256_castsi256_ps(x.v)}; }
static inline F32 load_bytes(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
}
static inline void store_bytes(int8_t* p, F32 integers) {
  __m256i x = _mm256_cvtps_epi32(integers.v);
  __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}

#else

struct I32 { Ints v; };
static inline I32 zeros() { return {(Ints){}}; }
static inline I32 load_words(const void* p) {
  I32 out;
  memcpy(&out.v, p, sizeof out.v);
  return out;
}
static inline void store_words(void* p, I32 x) { memcpy(p, &x.v, sizeof x.v); }
static inline I32 broadcast(int32_t x) { return {x + (Ints){}}; }
static inline I32 broadcast_word(const void* p) {
  int32_t bytes;
  memcpy(&bytes, p, 4);
  return broadcast(bytes);
}
static inline I32 operator+(I32 a, I32 b) { return {a.v + b.v}; }
static inline I32 operator-(I32 a, I32 b) { return {a.v - b.v}; }
static inline I32 operator&(I32 a, I32 b) { return {a.v & b.v}; }
static inline I32 operator|(I32 a, I32 b) { return {a.v | b.v}; }
static inline I32 operator^(I32 a, I32 b) { return {a.v ^ b.v}; }
typedef uint32_t Bits __attribute__((vector_size(32)));
static inline I32 operator>>(I32 a, int bits) { return {(Ints)((Bits)a.v >> bits)}; }
static inline I32 operator<<(I32 a, int bits) { return {(Ints)((Bits)a.v << bits)}; }
static inline F32 to_float(I32 x) { return {__builtin_convertvector(x.v, Floats)}; }
static inline F32 as_float(I32 x) { return {(Floats)x.v}; }
static inline F32 load_bytes(const uint8_t* p) {
  F32 out;
  for (int i = 0; i < WIDTH; i++) out.v[i] = p[i];
  return out;
}
static inline void store_bytes(int8_t* p, F32 integers) {
  for (int i = 0; i < WIDTH; i++) p[i] = (int8_t)nearbyintf(integers.v[i]);
}

#endif

// Prefetch distance for weights in bytes. The loops are too long for the hardware prefetcher. For several rows, a
// shorter distance is slower.
constexpr int64_t LEAD = 8192;
static inline void prefetch_weights(const void* address) { __builtin_prefetch((const char*)address + LEAD); }

// Makes GCC keep a sum in its register. Otherwise GCC copies the sum or reorders the additions as a tree, and runs out
// of registers.
static inline I32 in_place(I32 sum) {
#if defined(__AVX512F__)
  asm("" : "+v"(sum.v));
#elif defined(__AVX2__)
  asm("" : "+x"(sum.v));
#endif
  return sum;
}

// sums + the dot products of four unsigned and four signed bytes. AVX2 without VNNI adds two adjacent products in
// 16 bits, which is exact only if the unsigned bytes are at most 128.
static inline I32 dot(I32 sums, I32 u8, I32 s8) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(sums.v, u8.v, s8.v)};
#elif defined(__AVXVNNI__)
  return {_mm256_dpbusd_avx_epi32(sums.v, u8.v, s8.v)};
#elif defined(__AVX2__)
  __m256i pairs = _mm256_maddubs_epi16(u8.v, s8.v);
  return {_mm256_add_epi32(sums.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
#else
  for (int byte = 0; byte < 4; byte++) {
    sums.v += (Ints)((Bits)u8.v >> 8 * byte & 255) * ((Ints)((Bits)s8.v << (24 - 8 * byte)) >> 24);
  }
  return sums;
#endif
}

// sums + the dot products of four int8 weights and four int8 activations, stored with SHIFT added.
static inline I32 dot_signed(I32 sums, I32 shifted, I32 weight) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return dot(sums, shifted, weight);
#elif defined(__AVX2__)
  return dot(sums, {_mm256_abs_epi8(weight.v)}, {_mm256_sign_epi8(shifted.v, weight.v)});
#else
  for (int byte = 0; byte < 4; byte++) {
    int left = 24 - 8 * byte;
    sums.v += ((Ints)((Bits)shifted.v << left) >> 24) * ((Ints)((Bits)weight.v << left) >> 24);
  }
  return sums;
#endif
}

}  // namespace localllm::VARIANT
