// The tile unit: eight registers of 16 rows × 64 bytes, and products of them. Tiles 0–3 hold the sums (C), 4 and 5
// rows of activations (A), 6 and 7 weights (B); the kernels block 2 × 2, so that four loads feed four products.
//
// Compiled with TILES_EMULATED the same kernels run on plain memory (amx_emulator.h) on any CPU.
#pragma once

#include "vec.h"

namespace localllm::LANE {

// What a product of tiles multiplies: pairs of bf16 summed in float, or fours of int8 summed in int32.
enum class Product { bf16, int8 };

struct alignas(64) TileConfig {  // as ldtilecfg reads it
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;  // of a full row

}  // namespace localllm::LANE

#if defined(TILES_EMULATED)
#include "amx_emulator.h"
#else

namespace localllm::LANE {

// Own assembler instead of GCC's intrinsics: those do not tell the compiler which memory they read.
static inline void tile_configure(const TileConfig* config) { asm volatile("ldtilecfg %0" ::"m"(*config) : "memory"); }
static inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int tile>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
// For lines that are read again soon, and so had better stay in L1.
template <int tile>
static inline void tile_keep(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
// With the hint that they are not: 10 to 20 % faster where they come from L2.
template <int tile>
static inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
static inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
template <Product product, int c, int a, int b>  // c += a × b
static inline void tile_multiply() {
  if constexpr (product == Product::bf16)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  else
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

}  // namespace localllm::LANE
#endif

namespace localllm::LANE {

// Readies the calling thread's tiles until tile_release. `depth` bytes of the inner dimension go into one product: a row
// of A, and depth / 4 rows of B.
static inline void configure_tiles(int64_t depth) {
  TileConfig config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int tile = 0; tile < 8; tile++) {
    bool activations = tile == 4 || tile == 5, weights = tile >= 6;
    config.row_bytes[tile] = activations ? depth : TILE_BYTES;
    config.rows[tile] = weights ? depth / 4 : TILE_ROWS;
  }
  tile_configure(&config);
}

}  // namespace localllm::LANE
