// The product of tiles of rows and one panel of f32, bf16 or f16 weights. Rows of x are rearranged into tiles [steps,
// SUBSTEPS, rows of the tile], the order of the inner loop.
#pragma once

#include "rows.h"
#include "tile.h"
#include "../vectors/transpose.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t BLOCK = WIDTH == 16 ? 512 : 256;  // inputs per block of a panel
constexpr int64_t LEAD = 1536;  // prefetch distance in bytes, for a single tile

// Division of rows into tiles whose numbers of rows differ by one at most.
struct Tiles {
  int64_t count, size, remainder;
  explicit Tiles(int64_t rows)
      : count((rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS), size(rows / count), remainder(rows % count) {}
  int64_t begin(int64_t tile) const { return tile * size + (tile < remainder ? tile : remainder); }
  int rows(int64_t tile) const { return size + (tile < remainder); }
};

// Loads the inputs [first, first + WIDTH * P::INPUTS / P::SUBSTEPS) of a row as 4-byte lanes of type P::X; zeros from
// `end` on.
template <class P, class T>
static inline F32 lanes_of(const T* row, int64_t first, int64_t end) {
  int64_t left = end - first;
  if constexpr (P::INPUTS == P::SUBSTEPS) {
    return left >= WIDTH ? load(row + first) : load(row + first, left > 0 ? (int)left : 0);
  } else {
    float lanes[WIDTH] = {};
    if (left >= 2 * WIDTH) return load((const float*)(row + first));
    memcpy(lanes, row + first, left > 0 ? left * sizeof(T) : 0);
    return load(lanes);
  }
}

// Rearranges the inputs [from, to) of `rows` rows of x, of type T, from row `first` on into a tile, padded with zeros
// after the last input. It transposes blocks of WIDTH lanes.
template <class P, class T>
static inline void arrange_as(const LinearArgs& args, int64_t first, int rows, int64_t from, int64_t to,
                              typename P::X* out) {
  constexpr int64_t PER_LANE = P::INPUTS / P::SUBSTEPS;
  for (int64_t k = from; k < to; k += WIDTH * PER_LANE) {
    store_transposed(rows, (to - k) / PER_LANE, (float*)out + k / PER_LANE * rows,
                     [&](int row) { return lanes_of<P>(row_of<T>(args, first + row), k, args.in_features); });
  }
}

template <class P>
static inline void arrange(const LinearArgs& args, int64_t first, int rows, int64_t from, int64_t to,
                           typename P::X* out) {
  if constexpr (P::INPUTS != P::SUBSTEPS) {
    arrange_as<P, bf16>(args, first, rows, from, to, out);
  } else {
    switch (args.x_type) {
      case Type::f32: return arrange_as<P, float>(args, first, rows, from, to, out);
      case Type::bf16: return arrange_as<P, bf16>(args, first, rows, from, to, out);
      case Type::f16: return arrange_as<P, f16>(args, first, rows, from, to, out);
    }
  }
}

template <class P, int ROWS = 1>
static inline void multiply_tile(int rows, const typename P::X* x, const typename P::Weight* panel, int64_t steps,
                                 float* sums, int vector, bool from_zero, Prefetch prefetch) {
  if constexpr (ROWS < MAX_TILE_ROWS) {
    if (rows > ROWS) return multiply_tile<P, ROWS + 1>(rows, x, panel, steps, sums, vector, from_zero, prefetch);
  }
  tile<P, ROWS, out_vectors_of(ROWS)>(x, panel, steps, sums, vector, from_zero, prefetch);
}

template <class T>
static inline void write(T* out, const float* sums, const float* bias, int64_t out_features) {
  for (int64_t i = 0; i < out_features; i += WIDTH) {
    int left = out_features - i < WIDTH ? out_features - i : WIDTH;
    F32 sum = load(sums + i);
    if (left == WIDTH) {
      store(out + i, bias ? sum + load(bias + i) : sum);
    } else {
      store(out + i, bias ? sum + load(bias + i, left) : sum, left);
    }
  }
}

static inline void write(const LinearArgs& args, int64_t row, int64_t panel, const float* sums) {
  int64_t first = panel * PANEL, out_features = args.out_features - first < PANEL ? args.out_features - first : PANEL;
  int64_t offset = row * args.out_stride + first;
  const float* bias = args.bias ? args.bias + first : nullptr;
  switch (args.out_type) {
    case Type::f32: return write((float*)args.out + offset, sums, bias, out_features);
    case Type::bf16: return write((bf16*)args.out + offset, sums, bias, out_features);
    case Type::f16: return write((f16*)args.out + offset, sums, bias, out_features);
  }
}

// Multiplies one panel with the tiles [begin, end) of the rearranged x. The loop over the inputs has `depth` steps.
template <class P>
static inline void multiply(const typename P::X* x, const typename P::Weight* panel, int64_t depth, const Tiles& tiles,
                            int64_t begin, int64_t end, float* sums) {
  constexpr int64_t block = BLOCK / P::INPUTS, step_bytes = P::INPUTS * PANEL * sizeof(*panel);
  // A tile with one row more may need several passes to compute these vectors.
  int out_vectors = out_vectors_of(tiles.size);
  int64_t passes = (end - begin) * (VECTORS / out_vectors);
  for (int64_t step = 0; step == 0 || step < depth; step += block) {
    int64_t steps = depth - step < block ? depth - step : block;
    const typename P::Weight* block_weights = panel + step * P::INPUTS * PANEL;
    Prefetch prefetch{(const char*)block_weights + (passes == 1 ? LEAD : steps * step_bytes), step_bytes / passes};
    for (int vector = 0; vector < VECTORS; vector += out_vectors) {
      for (int64_t i = begin; i < end; i++) {
        int rows = tiles.rows(i);
        int64_t row = tiles.begin(i);
        for (int v = vector; v < vector + out_vectors; v += out_vectors_of(rows)) {
          multiply_tile<P>(rows, x + (row * depth + step * rows) * P::SUBSTEPS, block_weights, steps,
                           sums + (row - tiles.begin(begin)) * PANEL, v, step == 0, prefetch);
          prefetch.address += steps * step_bytes / passes;
        }
      }
    }
  }
}

#if defined(__AVX512BF16__)
// Whether the policy Dots is faster for bf16 weights. Not on Intel: its cores start one bf16 dot product in two cycles,
// but in the same time four float multiply-adds, which do twice the work.
static inline bool uses_dots(Type x_type) { return x_type == Type::bf16 && !__builtin_cpu_is("intel"); }
#endif

}  // namespace
}  // namespace localllm::VARIANT
