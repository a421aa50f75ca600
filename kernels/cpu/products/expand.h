// Products of quantised weights and float32 activations. For one or two rows, the product converts weights in
// registers. For more rows, it expands blocks of a panel to floats once for all rows of a chunk.
//
// A weight format is a class with these members, for one block of a panel (layout.h), which is one group of inputs:
//   format                                                   the Format
//   expand(block, begin, end, out [end - begin][32])         converts the inputs [begin, end) to floats
//   product<R>(block, inputs, x [inputs][R], sums [R][32])   adds the products of R rows to sums
#pragma once

#include "quantised.h"

namespace localllm::VARIANT {

constexpr int64_t EXPANDED_CHUNK = 128;  // rows at a time; limits the memory for activations, which are floats
constexpr int64_t EXPANDED_BLOCK = 64;   // inputs at a time; 8 KB of floats stay in the L1 cache
#if defined(__AVX512F__)
constexpr int EXPANDED_TILE_ROWS = 12;  // maximum rows of a tile, limited by the number of registers
#elif defined(__AVX2__)
constexpr int EXPANDED_TILE_ROWS = 6;
#else
constexpr int EXPANDED_TILE_ROWS = 3;
#endif
// With up to 2 rows, every worker converts a copy of its own and needs no barrier.
constexpr int EXPANDED_PRIVATE_ROWS = 2;

static inline int64_t expanded_bytes(const LinearArgs& args, int64_t rows) {
  return rows * padded_in_features(args.format, args.in_features, args.group) * 4;
}

template <class Weight>
static inline size_t expanded_shared(const LinearArgs& args) {
  int64_t rows = args.rows < EXPANDED_CHUNK ? args.rows : EXPANDED_CHUNK;
  return rows <= EXPANDED_PRIVATE_ROWS ? 0 : expanded_bytes(args, rows);
}

// sums [R][PANEL] += R rows of x × V vectors of outputs, over the first `inputs` inputs of an expanded block.
template <int R, int V>
static inline void expanded_tile(const float* weight, const float* x, int64_t inputs, float* sums) {
  F32 acc[R][V];
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * PANEL + v * WIDTH);
  }
  for (int64_t k = 0; k < inputs; k++, weight += PANEL, x += R) {
    F32 w[V];
    for (int v = 0; v < V; v++) w[v] = load(weight + v * WIDTH);
    for (int r = 0; r < R; r++) {
      F32 value = set1(x[r]);
      for (int v = 0; v < V; v++) acc[r][v] = fma(value, w[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) store(sums + r * PANEL + v * WIDTH, acc[r][v]);
  }
}

// Converts the inputs [begin, begin + 32) of the rows of a tile to floats, in the order of the inner loop.
static inline void expanded_fill(const LinearArgs& args, float* to, const Tiles& tiles, int64_t first, int64_t tile,
                                 int64_t begin) {
  int64_t row = tiles.begin(tile), size = tiles.size(tile);
  float* out = to + row * padded_in_features(args.format, args.in_features, args.group) + begin * size;
  for (int64_t r = 0; r < size; r++) {
    alignas(64) float values[32];
    with_type(args.x_type, [&](auto sample) {
      auto* x = row_of<decltype(sample)>(args, first + row + r) + begin;
      for (int64_t i = 0; i < 32; i += WIDTH) store(values + i, load_some(x + i, args.in_features - begin - i));
    });
    for (int64_t i = 0; i < 32; i++) out[i * size + r] = values[i];
  }
}

template <class Weight>
static inline void expanded_panel(const LinearArgs& args, const float* from, const Tiles& tiles, int64_t first,
                                  int64_t panel, int64_t begin, int64_t end, float* sums) {
  int64_t depth = padded_in_features(Weight::format, args.in_features, args.group), group = round_up(args.group, 32);
  int64_t row = tiles.begin(begin), rows = tiles.begin(end) - row;
  int64_t bytes = panel_bytes(Weight::format, args.in_features, args.group), block_bytes = bytes / (depth / group);
  const uint8_t* weight = (const uint8_t*)args.weight + panel * bytes;
  alignas(64) float values[EXPANDED_BLOCK * PANEL];
  memset(sums, 0, rows * PANEL * 4);
  for (int64_t g = 0; g < depth / group; g++) {
    if (args.rows <= EXPANDED_PRIVATE_ROWS) {
      with_number<EXPANDED_PRIVATE_ROWS>(rows, [&](auto number) {
        constexpr int R = decltype(number)::value;
        Weight::template product<R>(weight + g * block_bytes, group, from + g * group * R, sums);
      });
      continue;
    }
    for (int64_t k = 0; k < group; k += EXPANDED_BLOCK) {
      int64_t inputs = group - k < EXPANDED_BLOCK ? group - k : EXPANDED_BLOCK;
      Weight::expand(weight + g * block_bytes, k, k + inputs, values);
      for (int64_t tile = begin; tile < end; tile++) {
        int64_t first_row = tiles.begin(tile);
        with_number<EXPANDED_TILE_ROWS>(tiles.size(tile), [&](auto number) {
          constexpr int R = decltype(number)::value, V = R == 1 ? PANEL / WIDTH : 2;
          for (int j = 0; j < PANEL; j += V * WIDTH) {
            expanded_tile<R, V>(values + j, from + first_row * depth + (g * group + k) * R, inputs,
                                sums + (first_row - row) * PANEL + j);
          }
        });
      }
    }
  }
  for (int64_t r = 0; r < rows; r++) write_outputs(args, first + row + r, panel, sums + r * PANEL);
}

template <class Weight>
static inline void expanded_product(const LinearArgs& args, const Worker& worker) {
  int64_t depth = padded_in_features(Weight::format, args.in_features, args.group);
  int64_t panels = round_up(args.out_features, PANEL) / PANEL;
  bool private_copy = args.rows <= EXPANDED_PRIVATE_ROWS;
  for (int64_t first = 0; first < args.rows; first += EXPANDED_CHUNK) {
    int64_t rows = args.rows - first < EXPANDED_CHUNK ? args.rows - first : EXPANDED_CHUNK;
    Tiles tiles(rows, EXPANDED_TILE_ROWS);
    int64_t x_bytes = private_copy ? round_up(expanded_bytes(args, rows), 64) : 0;
    char* scratch = (char*)worker.scratch(x_bytes + rows * PANEL * 4);
    float* x = (float*)(private_copy ? scratch : args.shared);

    if (first) worker.barrier();  // all workers have finished reading the previous chunk
    Share share = share_of(tiles.count * (depth / 32), private_copy ? Worker{0, 1, worker.team} : worker);
    for (int64_t item = share.begin; item < share.end; item++) {
      expanded_fill(args, x, tiles, first, item / (depth / 32), item % (depth / 32) * 32);
    }
    if (!private_copy) worker.barrier();

    int64_t splits = splits_of(panels, tiles, worker);
    for (Chunks chunks(panels * splits, worker); chunks.next();) {
      for (int64_t item = chunks.begin; item < chunks.end; item++) {
        int64_t split = item % splits;
        expanded_panel<Weight>(args, x, tiles, first, item / splits, tiles.count * split / splits,
                               tiles.count * (split + 1) / splits, (float*)(scratch + x_bytes));
      }
    }
  }
}

}  // namespace localllm::VARIANT
