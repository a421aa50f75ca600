// Online softmax (Milakov & Gimelshein, 2018) with powers of two. The sums so far are relative to the largest score so
// far; when a larger score comes, they are scaled down.
#pragma once

#include "../vectors/vec.h"

namespace localllm::VARIANT {

constexpr float LOG2E = 1.44269504088896341f;
constexpr float LOWEST = -3e38f;  // lower than all scores, and finite, so that LOWEST - LOWEST is not NaN

// 2^x for x ≤ 127, accurate to 2 ulp; exactly 0 below -126.5. NaN stays NaN because max() returns its second operand
// for it.
static inline F32 exp2(F32 x) {
  F32 clamped = max(set1(-127.0f), x);
  F32 integer = round(clamped);
  F32 rest = clamped - integer;
  F32 p = set1(1.3264726899e-3f);  // minimax polynomial for the relative error over [-1/2, 1/2]
  p = fma(p, rest, set1(9.6715126606e-3f));
  p = fma(p, rest, set1(5.5507337442e-2f));
  p = fma(p, rest, set1(2.4022242085e-1f));
  p = fma(p, rest, set1(6.9314697760e-1f));
  p = fma(p, rest, set1(1.0f));
  return p * power_of_two(integer);
}

static inline float exp2_of(float x) {
  float out[WIDTH];
  store(out, exp2(set1(x)));
  return out[0];
}

// Converts dot products of queries and keys to scores: scales them, applies the soft cap (cap * tanh(score / cap)) and
// multiplies by log2(e), because the softmax uses powers of two.
struct Scores {
  float scale, cap;

  F32 operator()(F32 product) const {
    if (cap == 0.0f) return product * set1(scale * LOG2E);
    F32 twice = min(set1(126.0f), product * set1(scale / cap * 2.0f * LOG2E));
    F32 tanh = set1(1.0f) - set1(2.0f) / (set1(1.0f) + exp2(twice));
    return tanh * set1(cap * LOG2E);
  }
};

}  // namespace localllm::VARIANT
