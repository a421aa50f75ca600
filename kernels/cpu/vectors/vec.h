// The float vector type of each ISA variant, and its loads and stores for all element types. All functions are static
// inline in the namespace of the variant. Without that, the linker would keep one copy of a function for all variants,
// perhaps with instructions that this CPU does not have. For the same reason, kernels do not use standard library
// templates.
#pragma once

#include <math.h>
#include <string.h>

#include "../kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace localllm::VARIANT {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

static inline float to_float(float value) { return value; }
static inline float to_float(bf16 value) {
  uint32_t bits = (uint32_t)value.bits << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
static inline float to_float(f16 value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  uint32_t sign = (uint32_t)(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  float out;
  if (rest >= 0x7c00) {  // infinity or NaN
    uint32_t bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    memcpy(&out, &bits, 4);
    return out;
  }
  uint32_t bits = rest << 13;  // the exponent has the bias of f16: 2^112 corrects it, also for subnormals
  memcpy(&out, &bits, 4);
  out *= 0x1p112f;
  return sign ? -out : out;
#endif
}

static inline void from_float(float value, float* out) { *out = value; }
static inline void from_float(float value, bf16* out) {  // nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &value, 4);
  out->bits = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline void from_float(float value, f16* out) {
#if defined(__F16C__)
  out->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) {
    out->bits = sign | 0x7e00;
  } else if (bits >= 0x477ff000) {  // rounds to more than 65504: infinity
    out->bits = sign | 0x7c00;
  } else if (bits < 0x38800000) {  // subnormal: adding 0.5 rounds at the last bit of f16
    float tiny;
    memcpy(&tiny, &bits, 4);
    tiny += 0.5f;
    memcpy(&bits, &tiny, 4);
    out->bits = sign | (bits - 0x3f000000);
  } else {
    bits += 0xc8000fff + (bits >> 13 & 1);
    out->bits = sign | bits >> 13;
  }
#endif
}

#if defined(__AVX512F__)

constexpr int WIDTH = 16;
struct F32 { __m512 v; };
static inline F32 zero() { return {_mm512_setzero_ps()}; }
static inline F32 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
static inline F32 load(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline F32 load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline void store(bf16* p, F32 x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v));
#else
  float values[WIDTH];
  store(values, x);
  for (int i = 0; i < WIDTH; i++) from_float(values[i], p + i);
#endif
}
static inline void store(f16* p, F32 x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
static inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
static inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline float sum(F32 x) { return _mm512_reduce_add_ps(x.v); }
static inline float largest(F32 x) { return _mm512_reduce_max_ps(x.v); }
static inline F32 round(F32 x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline F32 power_of_two(F32 integer) {  // 2^integer for integers in -126…127
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(integer.v), _mm512_set1_epi32(127)), 23))};
}

#elif defined(__AVX2__)

constexpr int WIDTH = 8;
struct F32 { __m256 v; };
static inline F32 zero() { return {_mm256_setzero_ps()}; }
static inline F32 set1(float x) { return {_mm256_set1_ps(x)}; }
static inline F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
static inline void store(float* p, F32 x) { _mm256_storeu_ps(p, x.v); }
static inline F32 load(const bf16* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16))};
}
static inline F32 load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
static inline void store(bf16* p, F32 x) {
  __m256i bits = _mm256_castps_si256(x.v), one = _mm256_set1_epi32(1);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
static inline void store(f16* p, F32 x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
static inline F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline float sum(F32 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
static inline float largest(F32 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
static inline F32 round(F32 x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline F32 power_of_two(F32 integer) {
  return {_mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(integer.v), _mm256_set1_epi32(127)), 23))};
}

#else  // any CPU: vector extensions of GCC and Clang, which use NEON or SSE if available

constexpr int WIDTH = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
struct F32 { Floats v; };
static inline F32 set1(float x) { return {x - (Floats){}}; }
static inline F32 zero() { return {(Floats){}}; }
static inline F32 load(const float* p) {
  F32 out;
  memcpy(&out.v, p, sizeof out.v);
  return out;
}
static inline void store(float* p, F32 x) { memcpy(p, &x.v, sizeof x.v); }
template <class T>
static inline F32 load(const T* p) {
  F32 out;
  for (int i = 0; i < WIDTH; i++) out.v[i] = to_float(p[i]);
  return out;
}
template <class T>
static inline void store(T* p, F32 x) {
  for (int i = 0; i < WIDTH; i++) from_float(x.v[i], p + i);
}
static inline F32 operator+(F32 a, F32 b) { return {a.v + b.v}; }
static inline F32 operator-(F32 a, F32 b) { return {a.v - b.v}; }
static inline F32 operator*(F32 a, F32 b) { return {a.v * b.v}; }
static inline F32 operator/(F32 a, F32 b) { return {a.v / b.v}; }
static inline F32 fma(F32 a, F32 b, F32 c) { return {a.v * b.v + c.v}; }
static inline F32 max(F32 a, F32 b) { return {a.v > b.v ? a.v : b.v}; }
static inline F32 min(F32 a, F32 b) { return {a.v < b.v ? a.v : b.v}; }
static inline float sum(F32 x) {
  float out = 0;
  for (int i = 0; i < WIDTH; i++) out += x.v[i];
  return out;
}
static inline float largest(F32 x) {
  float out = x.v[0];
  for (int i = 1; i < WIDTH; i++) out = x.v[i] > out ? x.v[i] : out;
  return out;
}
static inline F32 round(F32 x) {
  F32 out;
  for (int i = 0; i < WIDTH; i++) out.v[i] = nearbyintf(x.v[i]);
  return out;
}
static inline F32 power_of_two(F32 integer) {
  Ints bits = (__builtin_convertvector(integer.v, Ints) + 127) << 23;
  return {(Floats)bits};
}

#endif

// Loads or stores the first n elements, 0 ≤ n ≤ WIDTH. A load fills the rest with zeros.
template <class T>
static inline F32 load(const T* p, int n) {
  T values[WIDTH];
  memset(values, 0, sizeof values);
  memcpy(values, p, n * sizeof(T));
  return load(values);
}
template <class T>
static inline void store(T* p, F32 x, int n) {
  T values[WIDTH];
  store(values, x);
  memcpy(p, values, n * sizeof(T));
}

// e^x, accurate to 2 ulp (Cody & Waite's range reduction, minimax polynomial of degree 5). x is clamped to -87.33…88.3.
// NaN stays NaN, because min() and max() return their second operand for it.
static inline F32 exp(F32 x) {
  F32 clamped = min(set1(88.3f), max(set1(-87.33f), x));
  F32 integer = round(clamped * set1(1.44269504f));
  F32 rest = fma(integer, set1(-0.693359375f), clamped);
  rest = fma(integer, set1(2.12194440e-4f), rest);
  F32 p = set1(1.9875691500e-4f);
  p = fma(p, rest, set1(1.3981999507e-3f));
  p = fma(p, rest, set1(8.3334519073e-3f));
  p = fma(p, rest, set1(4.1665795894e-2f));
  p = fma(p, rest, set1(1.6666665459e-1f));
  p = fma(p, rest, set1(5.0000001201e-1f));
  p = fma(p * rest, rest, rest + set1(1.0f));
  return p * power_of_two(integer);
}

}  // namespace localllm::VARIANT
