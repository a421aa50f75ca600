// The W8A8 product of tiles of rows and one panel. Activations are quantised to int8 with one scale per row; sums are
// integers.
#pragma once

#include "../vectors/prefetch.h"
#include "quantised.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t BLOCK = 512;       // inputs at a time; 16 KB of a panel stay in the L1 cache for all tiles
constexpr int64_t STEP = PANEL * 4;  // bytes of four inputs of a panel
#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 12;  // limited by the number of registers
#elif defined(__AVXVNNI__)
constexpr int MAX_TILE_ROWS = 6;
#else
constexpr int MAX_TILE_ROWS = 4;
#endif

struct Activations {
  uint8_t* quantised;  // per tile: [steps][rows of the tile], 4 bytes each (quantised.h), with SHIFT added to each byte
  float* largest;      // [rows] largest magnitude of each row; its quantised value is 127
};

static inline int64_t depth_of(const LinearArgs& args) {
  return padded_in_features(Format::int8, args.in_features, args.group);
}

static inline Activations activations_at(void* memory, int64_t rows, int64_t depth) {
  return {(uint8_t*)memory, (float*)((char*)memory + round_up(rows * depth, 64))};
}

static inline size_t activation_bytes(int64_t rows, int64_t depth) {
  return round_up(rows * depth, 64) + round_up(rows * 4, 64);
}

// sums [R][PANEL] += a tile of R rows × V vectors of outputs, over `steps` steps of four inputs.
template <int R, int V>
static inline void multiply(const int8_t* weight, const uint8_t* x, int64_t steps, int32_t* sums, Prefetch prefetch) {
  I32 acc[R][V];
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) acc[r][v] = load_words(sums + r * PANEL + v * WIDTH);
  }
  for (int64_t step = 0; step < steps; step++, weight += STEP, x += R * 4, prefetch.address += prefetch.step_bytes) {
    for (int line = 0; line < V * WIDTH * 4; line += 64) __builtin_prefetch(prefetch.address + line);
    I32 w[V];
    for (int v = 0; v < V; v++) w[v] = load_words(weight + v * WIDTH * 4);
    for (int r = 0; r < R; r++) {
      I32 words = broadcast_word(x + r * 4);
      for (int v = 0; v < V; v++) acc[r][v] = dot_signed(acc[r][v], words, w[v]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) store_words(sums + r * PANEL + v * WIDTH, acc[r][v]);
  }
}

// Multiplies one panel with the tiles [begin, end) and writes the outputs. `sums` [rows of the tiles][PANEL] is working
// memory.
static inline void panel_product(const LinearArgs& args, const Activations& from, const Tiles& tiles, int64_t first,
                                 int64_t panel, int64_t begin, int64_t end, int32_t* sums) {
  int64_t depth = depth_of(args), row = tiles.begin(begin), rows = tiles.begin(end) - row;
  const int8_t* weight = (const int8_t*)args.weight + panel * panel_bytes(Format::int8, args.in_features, args.group);
  const int32_t* totals = (const int32_t*)(weight + depth * PANEL);
  const float* scales = (const float*)(totals + PANEL);
  memset(sums, 0, rows * PANEL * 4);
  int64_t block = end - begin > 1 ? BLOCK : depth;
  for (int64_t k = 0; k < depth; k += block) {
    int64_t steps = (depth - k < block ? depth - k : block) / 4, passes = end - begin;
    const int8_t* block_weights = weight + k * PANEL;
    Prefetch prefetch{(const char*)block_weights + (passes == 1 ? LEAD : steps * STEP), STEP / passes};
    for (int64_t tile = begin; tile < end; tile++) {
      int64_t size = tiles.size(tile), first_row = tiles.begin(tile);
      with_number<MAX_TILE_ROWS>(size, [&](auto number) {
        constexpr int R = decltype(number)::value, V = R <= 2 ? PANEL / WIDTH : 2;
        for (int j = 0; j < PANEL; j += V * WIDTH) {
          multiply<R, V>(block_weights + j * 4, from.quantised + first_row * depth + k * R, steps,
                         sums + (first_row - row) * PANEL + j, {prefetch.address + j * 4, prefetch.step_bytes});
        }
      });
      prefetch.address += steps * prefetch.step_bytes;
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    alignas(64) float values[PANEL];
    for (int j = 0; j < PANEL; j += WIDTH) {
      I32 sum = load_words(sums + r * PANEL + j);
      if (SHIFT) sum = sum - (load_words(totals + j) << 7);
      store(values + j, to_float(sum) * (set1(from.largest[row + r] / 127.0f) * load(scales + j)));
    }
    write_outputs(args, first + row + r, panel, values);
  }
}

}  // namespace
}  // namespace localllm::VARIANT
