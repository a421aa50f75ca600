// Access to the weights of each format in a panel (products/layout.h). bf16 and int8 panels already have the tile
// layout; int4, fp8 and MXFP4 weights are expanded to tiles in the `expanded_tiles` buffer, some steps at a time.
#pragma once

#include "plan.h"
#include "../products/mxfp4_weights.h"

namespace localllm::VARIANT {
namespace {  // so that member functions that are not inlined have internal linkage

typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t SignedWords __attribute__((vector_size(64)));
typedef float Floats16 __attribute__((vector_size(64)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef int8_t Bytes64 __attribute__((vector_size(64)));

struct Weights {
  const uint8_t* panels;
  int64_t panel_bytes, group;
  const Plan* plan;

  const uint8_t* panel(int64_t index) const { return panels + index * panel_bytes; }
};

struct DenseWeights : Weights {
  static constexpr Product product = Product::bf16;
  static constexpr bool expanded = false;
  const uint8_t* step_data(const uint8_t* panel, int64_t step) const { return panel + step * 2048; }
  const uint8_t* tiles(const uint8_t* panel, int64_t step, int64_t, uint8_t*) const { return step_data(panel, step); }
  void scales(const uint8_t*, int64_t, float*) const {}
};

struct Int8Weights : Weights {
  static constexpr Product product = Product::int8;
  static constexpr bool expanded = false;
  const uint8_t* step_data(const uint8_t* panel, int64_t step) const { return panel + step * 2048; }
  const uint8_t* tiles(const uint8_t* panel, int64_t step, int64_t, uint8_t*) const { return step_data(panel, step); }
  void scales(const uint8_t* panel, int64_t, float* to) const {
    memcpy(to, step_data(panel, plan->steps) + PANEL * 4, PANEL * 4);
  }
};

template <Product kind>
struct Int4Weights : Weights {
  static constexpr Product product = kind;
  static constexpr bool expanded = true;

  const uint8_t* step_data(const uint8_t* panel, int64_t step) const {
    const uint8_t* start = panel + step / plan->group_steps * (PANEL * 3 + group * PANEL / 2);
    int64_t within = step % plan->group_steps;
    return within ? start + PANEL * 3 + within * plan->step * PANEL / 2 : start;
  }
  const uint8_t* tiles(const uint8_t* panel, int64_t step, int64_t count, uint8_t* expanded_tiles) const {
    uint8_t* to = expanded_tiles;
    for (int64_t end = step + count; step < end; step++) {
      int64_t within = step % plan->group_steps;
      const uint8_t *zeros = step_data(panel, step - within) + PANEL * 2;
      const uint8_t *nibbles = within ? step_data(panel, step) : zeros + PANEL;
      SignedWords zero[2] = {to_words(zeros), to_words(zeros + 16)};
      for (int64_t k = 0; k < plan->step; k += 4, nibbles += 64) to = expand(nibbles, zero, to);
    }
    return expanded_tiles;
  }
  void scales(const uint8_t* panel, int64_t group_index, float* to) const {
    const f16* from = (const f16*)step_data(panel, group_index * plan->group_steps);
    for (int j = 0; j < PANEL; j += WIDTH) store(to + j, load(from + j));
  }

 private:
  static SignedWords to_words(const uint8_t* zeros) {
    Bytes16 bytes;
    memcpy(&bytes, zeros, sizeof bytes);
    return __builtin_convertvector(bytes, SignedWords);
  }
  // Expands the weights of 4 inputs and 32 outputs. Returns the end of the written bytes.
  static uint8_t* expand(const uint8_t* nibbles, const SignedWords* zero, uint8_t* to) {
    Words both;
    memcpy(&both, nibbles, 64);
    for (int half = 0; half < 2; half++) {
      Words word = (half ? both >> 4 : both) & 0x0f0f0f0fu;
      if constexpr (kind == Product::int8) {
        Bytes64 bytes = (Bytes64)word - (Bytes64)(zero[half] * 0x01010101);
        memcpy(to + half * 64, &bytes, 64);
      } else {
        for (int pair = 0; pair < 2; pair++) {  // small integers are exact in bf16, which is the upper half of a float
          Floats16 even = __builtin_convertvector((SignedWords)(word >> (pair * 16) & 15u) - zero[half], Floats16);
          Floats16 odd = __builtin_convertvector((SignedWords)(word >> (pair * 16 + 8) & 15u) - zero[half], Floats16);
          Words joined = (Words)even >> 16 | ((Words)odd & 0xffff0000u);
          memcpy(to + pair * 128 + half * 64, &joined, 64);
        }
      }
    }
    return to + (kind == Product::int8 ? 128 : 256);
  }
};

struct Fp8Weights : Weights {  // e4m3 values are exact in bf16; scales() corrects their exponent bias (products/fp8.cpp)
  static constexpr Product product = Product::bf16;
  static constexpr bool expanded = true;

  const uint8_t* step_data(const uint8_t* panel, int64_t step) const {
    const uint8_t* block = panel + step / plan->group_steps * (PANEL * 4 + plan->group_steps * 1024);
    int64_t within = step % plan->group_steps;
    return within ? block + PANEL * 4 + within * 1024 : block;
  }
  const uint8_t* tiles(const uint8_t* panel, int64_t step, int64_t count, uint8_t* expanded_tiles) const {
    uint8_t* to = expanded_tiles;
    for (int64_t end = step + count; step < end; step++, to += 2048) {
      const uint8_t* from = step_data(panel, step) + (step % plan->group_steps ? 0 : PANEL * 4);
      for (int64_t i = 0; i < 1024; i += PANEL) expand(from + i, (bf16*)to + i);
    }
    return expanded_tiles;
  }
  void scales(const uint8_t* panel, int64_t group_index, float* to) const {
    const float* from = (const float*)step_data(panel, group_index * plan->group_steps);
    for (int j = 0; j < PANEL; j += WIDTH) store(to + j, load(from + j) * set1(256.0f));
  }

 private:
  static void expand(const uint8_t* from, bf16* to) {
    uint16_t halves[PANEL];
    for (int i = 0; i < PANEL; i++) halves[i] = (uint16_t)((from[i] & 0x80) << 8 | (from[i] & 0x7f) << 7);
    for (int i = 0; i < PANEL; i += WIDTH) store(to + i, load((const f16*)halves + i));
  }
};

// Tiles have the exact values: e2m1 numbers times a power of two are bf16. A step is one group of inputs.
struct Mxfp4Weights : Weights {
  static constexpr Product product = Product::bf16;
  static constexpr bool expanded = true;

  const uint8_t* step_data(const uint8_t* panel, int64_t step) const { return panel + step * MXFP4_BLOCK_BYTES; }
  const uint8_t* tiles(const uint8_t* panel, int64_t step, int64_t count, uint8_t* expanded_tiles) const {
    uint8_t* to = expanded_tiles;
    for (int64_t end = step + count; step < end; step++, to += 2048) expand(step_data(panel, step), to);
    return expanded_tiles;
  }
  void scales(const uint8_t*, int64_t, float*) const {}

 private:
  static void expand(const uint8_t* block, uint8_t* to) {
    for (int half = 0; half < 2; half++) {
      for (int j = 0; j < 16; j += WIDTH) {
        F32 scale = e8m0(block + half * 16 + j);
        for (int k = 0; k < 32; k += 2) {  // two inputs share a word of a tile
          I32 bytes = load_words(block + PANEL + k / 4 * 64 + j * 4) >> (k % 4 * 8 + half * 4);
          float even[WIDTH], odd[WIDTH];
          store(even, e2m1(bytes) * scale);
          store(odd, e2m1(bytes >> 8) * scale);
          uint32_t words[2][WIDTH];
          memcpy(words[0], even, sizeof even);
          memcpy(words[1], odd, sizeof odd);
          for (int i = 0; i < WIDTH; i++) words[0][i] = words[0][i] >> 16 | (words[1][i] & 0xffff0000u);
          memcpy(to + k / 2 * 128 + half * 64 + j * 4, words[0], sizeof words[0]);
        }
      }
    }
  }
};

}  // namespace
}  // namespace localllm::VARIANT
