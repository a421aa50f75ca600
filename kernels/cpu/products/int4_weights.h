// int4 weights with float activations (W4A16), a weight format for expand.h.
#pragma once

#include "expand.h"

namespace localllm::VARIANT {

// weight = (nibble - zero point) * scale
struct Nibbles {
  static constexpr Format format = Format::int4;

  static void expand(const uint8_t* block, int64_t begin, int64_t end, float* out) {
    for (int j = 0; j < 16; j += WIDTH) {
      for (int half = 0; half < 2; half++) {
        F32 scale = load((const f16*)block + half * 16 + j), point = load_bytes(block + PANEL * 2 + half * 16 + j);
        const uint8_t* nibbles = block + PANEL * 3 + begin / 4 * 64 + j * 4;
        float* to = out + half * 16 + j;
        for (int64_t k = begin; k < end; k += 4, nibbles += 64, to += 4 * PANEL) {
          I32 bytes = load_words(nibbles) >> 4 * half;
          for (int i = 0; i < 4; i++) store(to + i * PANEL, (to_float(bytes >> 8 * i & broadcast(15)) - point) * scale);
        }
      }
    }
  }

  // Uses the identity: sum of (weight * x) = scale * (sum of (nibble * x) - zero point * sum of x).
  template <int R>
  static void product(const uint8_t* block, int64_t inputs, const float* x, float* sums) {
    static_assert(WIDTH % R == 0);
    F32 lanes = zero();
    for (int64_t i = 0; i < inputs * R; i += WIDTH) lanes = lanes + load(x + i);
    float partial[WIDTH], totals[R] = {};
    store(partial, lanes);
    for (int i = 0; i < WIDTH; i++) totals[i % R] += partial[i];
    for (int j = 0; j < 16; j += WIDTH) {
      F32 acc[R][2][2];  // two independent sums per output, which hide the latency of additions
      for (int r = 0; r < R; r++) acc[r][0][0] = acc[r][0][1] = acc[r][1][0] = acc[r][1][1] = zero();
      const uint8_t* nibbles = block + PANEL * 3 + j * 4;
      for (int64_t k = 0; k < inputs; k += 4, nibbles += 64) {
        prefetch_weights(nibbles);
        I32 bytes = load_words(nibbles);
#pragma GCC unroll 4  // without it, GCC unrolls the loop too late and does not keep the sums in registers
        for (int i = 0; i < 4; i++) {
          F32 low = to_float(bytes >> 8 * i & broadcast(15)), high = to_float(bytes >> (8 * i + 4) & broadcast(15));
          for (int r = 0; r < R; r++) {
            F32 value = set1(x[(k + i) * R + r]);
            acc[r][0][i % 2] = fma(value, low, acc[r][0][i % 2]);
            acc[r][1][i % 2] = fma(value, high, acc[r][1][i % 2]);
          }
        }
      }
      for (int half = 0; half < 2; half++) {
        int column = half * 16 + j;
        F32 scale = load((const f16*)block + column), point = zero() - load_bytes(block + PANEL * 2 + column);
        for (int r = 0; r < R; r++) {
          F32 sum = fma(point, set1(totals[r]), acc[r][half][0] + acc[r][half][1]);
          store(sums + r * PANEL + column, fma(sum, scale, load(sums + r * PANEL + column)));
        }
      }
    }
  }
};

}  // namespace localllm::VARIANT
