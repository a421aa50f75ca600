// An emulator of the AMX tile unit, for tests on CPUs without AMX. It is strict: an error that is a fault in hardware
// (tiles that are not configured, shapes that do not match) aborts the process, and newly configured tiles contain
// garbage.
#pragma once

#include <stdio.h>
#include <stdlib.h>

namespace localllm::VARIANT {

struct TileUnit {
  TileConfig config;
  uint8_t data[8][TILE_ROWS][TILE_BYTES];
};

static thread_local TileUnit tile_unit;

static inline void tile_check(bool valid, const char* error) {
  if (valid) return;
  fprintf(stderr, "tile emulator: %s\n", error);
  abort();
}

static inline void tile_configure(const TileConfig* config) {
  tile_check(config->palette == 1 && (uintptr_t)config % 64 == 0, "invalid configuration");
  for (int tile = 0; tile < 8; tile++)
    tile_check(config->rows[tile] <= TILE_ROWS && config->row_bytes[tile] <= TILE_BYTES, "invalid configuration");
  tile_unit.config = *config;
  memset(tile_unit.data, 0xff, sizeof tile_unit.data);
}
static inline void tile_release() { tile_unit.config.palette = 0; }

template <int tile>
static inline int tile_rows() {
  tile_check(tile_unit.config.palette == 1, "a tile was used before its configuration");
  return tile_unit.config.rows[tile];
}

template <int tile>
static inline void tile_zero() {
  tile_rows<tile>();
  memset(tile_unit.data[tile], 0, sizeof tile_unit.data[tile]);
}
template <int tile>
static inline void tile_load(const void* from, int64_t stride) {
  for (int row = 0; row < tile_rows<tile>(); row++)
    memcpy(tile_unit.data[tile][row], (const uint8_t*)from + row * stride, tile_unit.config.row_bytes[tile]);
}
template <int tile>
static inline void tile_load_keep(const void* from, int64_t stride) {
  tile_load<tile>(from, stride);
}
template <int tile>
static inline void tile_store(void* to, int64_t stride) {
  for (int row = 0; row < tile_rows<tile>(); row++)
    memcpy((uint8_t*)to + row * stride, tile_unit.data[tile][row], tile_unit.config.row_bytes[tile]);
}

static inline float tile_number(bf16 value) {  // the tile unit treats denormal numbers as zero
  return (value.bits & 0x7f80) ? to_float(value) : to_float(bf16{(uint16_t)(value.bits & 0x8000)});
}

// Sums even and odd inputs separately and adds both sums at the end, like the pseudo-code of Intel's manual.
static inline void tile_row(const bf16* a, const uint8_t b[][TILE_BYTES], int depth, float* c) {
  float sums[2][16] = {};
  for (int k = 0; k < depth / 2; k++) {
    const bf16* weights = (const bf16*)b[k / 2] + k % 2;
    for (int n = 0; n < 16; n++) sums[k % 2][n] += tile_number(a[k]) * tile_number(weights[2 * n]);
  }
  for (int n = 0; n < 16; n++) c[n] += sums[0][n] + sums[1][n];
}
static inline void tile_row(const int8_t* a, const uint8_t b[][TILE_BYTES], int depth, int32_t* c) {
  for (int k = 0; k < depth; k++)
    for (int n = 0; n < 16; n++) c[n] += a[k] * ((const int8_t*)b[k / 4])[4 * n + k % 4];
}

template <Product product, int c, int a, int b>
static inline void tile_multiply() {
  const TileConfig& config = tile_unit.config;
  tile_check(tile_rows<a>() == tile_rows<c>(), "rows of A and C differ");
  tile_check(config.row_bytes[a] == tile_rows<b>() * 4, "A is not as deep as B");
  tile_check(config.row_bytes[b] == TILE_BYTES && config.row_bytes[c] == TILE_BYTES, "columns of B and C differ");
  for (int row = 0; row < config.rows[c]; row++) {
    uint8_t *left = tile_unit.data[a][row], *sums = tile_unit.data[c][row];
    if constexpr (product == Product::bf16)
      tile_row((const bf16*)left, tile_unit.data[b], config.row_bytes[a], (float*)sums);
    else
      tile_row((const int8_t*)left, tile_unit.data[b], config.row_bytes[a], (int32_t*)sums);
  }
}

}  // namespace localllm::VARIANT
