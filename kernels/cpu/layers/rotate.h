// Rotary position embedding of one head (Su et al., 2021).
#pragma once

#include "../vectors/row.h"

namespace localllm::VARIANT {

// Rotates x [2 * half] in place by cos and sin [half]. The rotated pairs are (i, i + half) or (2i, 2i + 1).
static inline void rotate(Rotation rotation, const float* cos, const float* sin, int64_t half, float* x) {
  if (rotation == Rotation::neox) {
    each_vector(0, half, [=](int64_t i, auto n) {
      F32 a = load(x + i, n), b = load(x + half + i, n), c = load(cos + i, n), s = load(sin + i, n);
      store(x + i, a * c - b * s, n);
      store(x + half + i, b * c + a * s, n);
    });
  } else {
    for (int64_t i = 0; i < half; i++) {
      float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  }
}

}  // namespace localllm::VARIANT
