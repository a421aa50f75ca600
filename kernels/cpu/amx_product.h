// The product of one block of rows and one panel over a chunk of the inputs, its sums in tiles from end to end.
#pragma once

#include "amx_finish.h"

namespace localllm::LANE {

constexpr int64_t SUMS = BLOCK * PANEL;  // of one block and one panel

// The four (or, for 16 rows, two) tiles of sums.
template <int tiles>
static inline void clear_sums() {
  tile_zero<0>(), tile_zero<1>();
  if constexpr (tiles == 2) tile_zero<2>(), tile_zero<3>();
}
template <int tiles>
static inline void load_sums(const float* sums) {
  tile_load<0>(sums, PANEL * 4), tile_load<1>(sums + 16, PANEL * 4);
  if constexpr (tiles == 2) tile_load<2>(sums + 512, PANEL * 4), tile_load<3>(sums + 528, PANEL * 4);
}
template <int tiles>
static inline void store_sums(float* sums) {
  tile_store<0>(sums, PANEL * 4), tile_store<1>(sums + 16, PANEL * 4);
  if constexpr (tiles == 2) tile_store<2>(sums + 512, PANEL * 4), tile_store<3>(sums + 528, PANEL * 4);
}

// Memory wanted soon, fetched into L2 some lines at every step.
struct Ahead {
  const uint8_t* at;
  int64_t lines;
};

template <Product product, int tiles>
static inline void multiply(const uint8_t* a, const uint8_t* b, int64_t depth, int64_t steps, Ahead& ahead) {
  int64_t a_tile = depth * TILE_ROWS, a_step = a_tile * tiles, b_step = depth * PANEL;
  for (int64_t step = 0; step < steps; step++, a += a_step, b += b_step) {
    tile_load<6>(b, 128);
    tile_load<4>(a, depth);
    tile_multiply<product, 0, 4, 6>();
    tile_load<7>(b + 64, 128);
    tile_multiply<product, 1, 4, 7>();
    if constexpr (tiles == 2) {
      tile_load<5>(a + a_tile, depth);
      tile_multiply<product, 2, 5, 6>();
      tile_multiply<product, 3, 5, 7>();
    }
    for (int64_t i = 0; i < ahead.lines; i++, ahead.at += 64) __builtin_prefetch(ahead.at, 0, 2);
  }
}

// to += sums of one group × the scales of its rows (whole numbers only) and columns.
template <Product product, int tiles>
static inline void fold(const float* sums, float* to, bool first, const float* row_scales, const float* column_scales) {
  for (int j = 0; j < PANEL; j += WIDTH) {
    F32 column = load(column_scales + j);
    for (int row = 0; row < tiles * TILE_ROWS; row++) {
      int at = row * PANEL + j;
      F32 before = first ? zero() : load(to + at), scale = column;
      if constexpr (product == Product::int8) scale = scale * set1(row_scales[row]);
      store(to + at, fma(number<product>(sums + at), scale, before));
    }
  }
}

// One block of rows × one panel over `steps` of the inputs from `first` on; `stage` holds two blocks of sums.
template <class Source, int tiles>
static inline void block_product(const Plan& plan, const uint8_t* a, const uint8_t* b, int64_t first, int64_t steps,
                                 const float* row_scales, const float* column_scales, float* sums, float* stage,
                                 Ahead ahead) {
  constexpr Product product = Source::product;
  if (plan.groups == 1) {
    if (first)
      load_sums<tiles>(sums);
    else
      clear_sums<tiles>();
    multiply<product, tiles>(a, b, plan.depth, steps, ahead);
    return store_sums<tiles>(sums);
  }
  // The tiles are a group ahead of the vectors that scale and add up their sums.
  int64_t group = first / plan.group_steps, groups = steps / plan.group_steps;
  for (int64_t i = 0; i <= groups; i++) {
    if (i < groups) {
      clear_sums<tiles>();
      multiply<product, tiles>(a, b, plan.depth, plan.group_steps, ahead);
      store_sums<tiles>(stage + i % 2 * SUMS);
      a += plan.group_steps * plan.depth * TILE_ROWS * tiles, b += plan.group_steps * plan.depth * PANEL;
    }
    if (i)
      fold<product, tiles>(stage + (i - 1) % 2 * SUMS, sums, group + i == 1, row_scales + (group + i - 1) * BLOCK,
                           column_scales + (i - 1) * PANEL);
  }
}

}  // namespace localllm::LANE
