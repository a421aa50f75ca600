// The product of a block of 32 (or 16) rows × 32 columns. The sums stay in tiles from the first step to the last.
#pragma once

#include "tiles.h"

namespace localllm::VARIANT {

constexpr int64_t SUMS = 2 * TILE_ROWS * PANEL;  // sums per block, 4 bytes each: float or int32

// These functions clear, load or store the tiles of sums: four tiles for 32 rows, two for 16 rows.
template <int tiles>
static inline void clear_sums() {
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (tiles == 2) {
    tile_zero<2>();
    tile_zero<3>();
  }
}
template <int tiles>
static inline void load_sums(const float* sums) {
  tile_load<0>(sums, PANEL * 4);
  tile_load<1>(sums + 16, PANEL * 4);
  if constexpr (tiles == 2) {
    tile_load<2>(sums + 512, PANEL * 4);
    tile_load<3>(sums + 528, PANEL * 4);
  }
}
template <int tiles>
static inline void store_sums(float* sums) {
  tile_store<0>(sums, PANEL * 4);
  tile_store<1>(sums + 16, PANEL * 4);
  if constexpr (tiles == 2) {
    tile_store<2>(sums + 512, PANEL * 4);
    tile_store<3>(sums + 528, PANEL * 4);
  }
}

// Prefetches memory into L2, `lines` cache lines in every step.
struct LinePrefetch {
  const uint8_t* address;
  int64_t lines;  // cache lines per step

  void fetch() {
    for (int64_t i = 0; i < lines; i++, address += 64) __builtin_prefetch(address, 0, 2);
  }
};

// Sums += a [steps][tiles][16][depth] × b [steps][depth / 4][32][4 bytes]. Loads each tile of the next step right after
// the last product of this step that reads the same tile register. This hides the latency of loads, above all if two
// threads share a core.
template <Product product, int tiles>
static inline void multiply(const uint8_t* a, const uint8_t* b, int64_t depth, int64_t steps,
                            LinePrefetch& prefetch) {
  int64_t a_tile = depth * TILE_ROWS, a_step = a_tile * tiles, b_step = depth * PANEL;
  tile_load<4>(a, depth);
  tile_load_keep<6>(b, 128);
  tile_load_keep<7>(b + 64, 128);
  if constexpr (tiles == 2) tile_load<5>(a + a_tile, depth);
  for (int64_t left = steps; left > 1; left--) {
    a += a_step;
    b += b_step;
    tile_multiply<product, 0, 4, 6>();
    tile_multiply<product, 1, 4, 7>();
    tile_load<4>(a, depth);
    if constexpr (tiles == 2) tile_multiply<product, 2, 5, 6>();
    tile_load_keep<6>(b, 128);
    if constexpr (tiles == 2) tile_multiply<product, 3, 5, 7>();
    tile_load_keep<7>(b + 64, 128);
    if constexpr (tiles == 2) tile_load<5>(a + a_tile, depth);
    prefetch.fetch();
  }
  tile_multiply<product, 0, 4, 6>();
  tile_multiply<product, 1, 4, 7>();
  if constexpr (tiles == 2) {
    tile_multiply<product, 2, 5, 6>();
    tile_multiply<product, 3, 5, 7>();
  }
  prefetch.fetch();
}

}  // namespace localllm::VARIANT
