// Gumbel noise for sampling, a function of the key and the token only. Defined in engine/sampling.py.
#pragma once

#include "../vectors/vec.h"

namespace localllm::VARIANT {

typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Signed __attribute__((vector_size(WIDTH * 4)));
typedef float Reals __attribute__((vector_size(WIDTH * 4)));

constexpr uint32_t GOLDEN = 0x9E3779B9u;

// The finaliser of murmur3, for a 32-bit word or a vector of words.
template <class W>
static inline W mix(W h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

static inline uint32_t draw_key(uint32_t seed_low, uint32_t seed_high, uint32_t position) {
  uint32_t key = mix(seed_low + GOLDEN);
  key = mix((key ^ seed_high) + GOLDEN);
  return mix((key ^ position) + GOLDEN);
}

static inline Words from_zero() {  // 0, 1, 2, …
  Words out;
  for (int i = 0; i < WIDTH; i++) out[i] = (uint32_t)i;
  return out;
}

// Odd 24-bit integers for the tokens first, first + 1, …. Divided by 2^24, they are uniform random numbers.
static inline Words uniform_bits(uint32_t key, uint32_t first) {
  return mix(((from_zero() + first) ^ key) + GOLDEN) >> 8 | 1;
}

static inline F32 as_float(Words small) { return {(decltype(F32::v))__builtin_convertvector((Signed)small, Reals)}; }

// Natural logarithm of positive normal numbers, accurate to 1 ulp. For x = 2^e * (1 + f) with 1 + f in [√½, √2) it is
// e ln 2 + log(1 + f). The polynomial for log(1 + f) has a relative error of 6e-9, also where the logarithm is near 0.
static inline F32 log(F32 x) {
  constexpr uint32_t HALF_ROOT = 0x3f3504f3;  // √½
  Words bits = (Words)x.v - HALF_ROOT;
  F32 e = {(decltype(F32::v))__builtin_convertvector((Signed)bits >> 23, Reals)};
  F32 f = F32{(decltype(F32::v))((bits & 0x7fffff) + HALF_ROOT)} - set1(1.0f);
  F32 p = set1(-0.0763450041f);
  p = fma(p, f, set1(0.1276157945f));
  p = fma(p, f, set1(-0.1316018254f));
  p = fma(p, f, set1(0.1420175731f));
  p = fma(p, f, set1(-0.1662335694f));
  p = fma(p, f, set1(0.2000122666f));
  p = fma(p, f, set1(-0.2500081956f));
  p = fma(p, f, set1(0.3333333135f));
  F32 square = f * f;
  p = fma(p * f, square, fma(e, set1(-2.12194440e-4f), square * set1(-0.5f)));
  return fma(e, set1(0.693359375f), f + p);
}

static inline F32 gumbel(Words bits) {
  F32 none = zero();
  return none - log(none - log(as_float(bits) * set1(0x1p-24f)));
}

// An upper bound of gumbel(bits) that needs no logarithm. Since -ln u ≥ 1 - u, the noise is at most -ln(1 - u), and the
// exponent of 1 - u bounds that. Only the few tokens that could win with this bound need the exact noise.
static inline F32 gumbel_bound(Words bits) {
  F32 rest = as_float((1 << 24) - bits);  // (1 - u) * 2^24, at least 1
  F32 exponent = {(decltype(F32::v))__builtin_convertvector((Signed)rest.v >> 23, Reals)};
  return fma(exponent, set1(-0.69314718f), set1(151.0f * 0.69314718f + 1e-3f));
}

}  // namespace localllm::VARIANT
