// The AMX tile unit: eight tile registers of 16 rows × 64 bytes, and their products. Tiles 0–3 are sums (C), tiles 4
// and 5 activations (A), tiles 6 and 7 weights (B). The kernels use blocks of 2 × 2 tiles, so four loads serve four
// products.
//
// With TILES_EMULATED, the same kernels run on any CPU (emulator.h).
#pragma once

#include "../vectors/vec.h"

namespace localllm::VARIANT {

// The element types of a tile product: bf16 with float sums (two inputs per word), or int8 with int32 sums (four
// inputs).
enum class Product { bf16, int8 };

struct alignas(64) TileConfig {  // the operand of ldtilecfg
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;  // bytes of a tile row

}  // namespace localllm::VARIANT

#if defined(TILES_EMULATED)
#include "emulator.h"
#else

namespace localllm::VARIANT {

// Inline assembler, because GCC's intrinsics do not tell the compiler which memory they read.
static inline void tile_configure(const TileConfig* config) { asm volatile("ldtilecfg %0" ::"m"(*config) : "memory"); }
static inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int tile>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
// Loads a tile and keeps its cache lines in L1, for data that is read again soon.
template <int tile>
static inline void tile_load_keep(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
// Loads a tile with the hint not to keep its cache lines in L1, which is faster for data in L2.
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

}  // namespace localllm::VARIANT
#endif

namespace localllm::VARIANT {

// Configures the tiles of the calling thread; call tile_release() afterwards. One tile product covers `depth` bytes of
// the inner dimension: `depth` bytes of each row of A, and depth / 4 rows of B.
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

}  // namespace localllm::VARIANT
