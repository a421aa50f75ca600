// The product of one block of rows and one panel over a chunk of the inputs. The sums stay in tiles for the whole chunk
// or, with groups, for one group.
#pragma once

#include "block.h"
#include "finish.h"

namespace localllm::VARIANT {

// to += sums of one group × scales of its columns × scales of its rows (int8 only).
template <Product product, int tiles>
static inline void add_scaled(const float* sums, float* to, bool first, const float* row_scales,
                              const float* column_scales) {
  for (int j = 0; j < PANEL; j += WIDTH) {
    F32 column = load(column_scales + j);
    for (int row = 0; row < tiles * TILE_ROWS; row++) {
      int index = row * PANEL + j;
      F32 before = first ? zero() : load(to + index), scale = column;
      if constexpr (product == Product::int8) scale = scale * set1(row_scales[row]);
      store(to + index, fma(number<product>(sums + index), scale, before));
    }
  }
}

// Multiplies one block of rows and one panel over `steps` steps from `first` on. `stage` is memory for two blocks of
// sums.
template <class Source, int tiles>
static inline void block_product(const Plan& plan, const uint8_t* a, const uint8_t* b, int64_t first, int64_t steps,
                                 const float* row_scales, const float* column_scales, float* sums, float* stage,
                                 LinePrefetch prefetch) {
  constexpr Product product = Source::product;
  if (plan.groups == 1) {
    if (first)
      load_sums<tiles>(sums);
    else
      clear_sums<tiles>();
    multiply<product, tiles>(a, b, plan.depth, steps, prefetch);
    return store_sums<tiles>(sums);
  }
  // Iteration i uses tile instructions to multiply group i, and vector instructions to scale the sums of group i - 1,
  // so that both overlap.
  int64_t group = first / plan.group_steps, groups = steps / plan.group_steps;
  for (int64_t i = 0; i <= groups; i++) {
    if (i < groups) {
      clear_sums<tiles>();
      multiply<product, tiles>(a, b, plan.depth, plan.group_steps, prefetch);
      store_sums<tiles>(stage + i % 2 * SUMS);
      a += plan.group_steps * plan.depth * TILE_ROWS * tiles;
      b += plan.group_steps * plan.depth * PANEL;
    }
    if (i)
      add_scaled<product, tiles>(stage + (i - 1) % 2 * SUMS, sums, group + i == 1, row_scales + (group + i - 1) * BLOCK,
                                 column_scales + (i - 1) * PANEL);
  }
}

}  // namespace localllm::VARIANT
