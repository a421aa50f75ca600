// A block of 32 rows (or 16) × 32 columns, its sums in tiles from the first step to the last.
#pragma once

#include "amx.h"

namespace localllm::LANE {

constexpr int64_t SUMS = 2 * TILE_ROWS * PANEL;  // of a block; floats, or whole numbers of the same size

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

  void fetch() {
    for (int64_t i = 0; i < lines; i++, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Sums += a [steps][tiles][16][depth] × b [steps][depth / 4][32][4 bytes]. Tiles of the next step are loaded between the
// products of this one, each as soon as nothing reads it any more: alone on a core that is 5 % faster than loading them
// where they are wanted, and 30 % where another thread shares the core.
template <Product product, int tiles>
static inline void multiply(const uint8_t* a, const uint8_t* b, int64_t depth, int64_t steps, Ahead& ahead) {
  int64_t a_tile = depth * TILE_ROWS, a_step = a_tile * tiles, b_step = depth * PANEL;
  tile_load<4>(a, depth);
  tile_keep<6>(b, 128), tile_keep<7>(b + 64, 128);
  if constexpr (tiles == 2) tile_load<5>(a + a_tile, depth);
  for (int64_t left = steps; left > 1; left--) {
    a += a_step, b += b_step;
    tile_multiply<product, 0, 4, 6>();
    tile_multiply<product, 1, 4, 7>();
    tile_load<4>(a, depth);
    if constexpr (tiles == 2) tile_multiply<product, 2, 5, 6>();
    tile_keep<6>(b, 128);
    if constexpr (tiles == 2) tile_multiply<product, 3, 5, 7>();
    tile_keep<7>(b + 64, 128);
    if constexpr (tiles == 2) tile_load<5>(a + a_tile, depth);
    ahead.fetch();
  }
  tile_multiply<product, 0, 4, 6>();
  tile_multiply<product, 1, 4, 7>();
  if constexpr (tiles == 2) {
    tile_multiply<product, 2, 5, 6>();
    tile_multiply<product, 3, 5, 7>();
  }
  ahead.fetch();
}

}  // namespace localllm::LANE
