// Products with f32, bf16 or f16 weights.
//
// 1. All workers rearrange x into tiles [steps, SUBSTEPS, rows of the tile] in `shared`, the order of the inner loop.
// 2. The workers divide the panel × tile items. A worker processes a panel in blocks that stay in the L1 or L2 cache
//    while it multiplies all tiles with them, so it reads the weights from memory only once.

#include "linear.h"
#include "tile.h"
#include "transpose.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t CHUNK_ROWS = 240;                 // maximum rows of a chunk; its sums for one panel need 30 KiB
constexpr int64_t CHUNK_BYTES = 8 << 20;            // maximum size of a rearranged chunk, which stays in the L3 cache
constexpr int64_t BLOCK = WIDTH == 16 ? 512 : 256;  // inputs per block of a panel
constexpr int64_t LEAD = 1536;                      // prefetch distance in bytes, for a single tile

static inline int64_t chunk_rows(const LinearArgs& args) {
  int64_t fit = CHUNK_BYTES / 4 / (args.in_features + 1) / MAX_TILE_ROWS * MAX_TILE_ROWS;
  int64_t max_rows = CHUNK_ROWS / MAX_TILE_ROWS * MAX_TILE_ROWS;
  return fit < MAX_TILE_ROWS ? MAX_TILE_ROWS : fit < max_rows ? fit : max_rows;
}

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

// Rearranges the inputs [from, to) of `rows` rows at x into a tile, padded with zeros after the last input. It
// transposes blocks of WIDTH lanes.
template <class P, class T>
static inline void arrange(const T* x, int64_t stride, int rows, int64_t in_features, int64_t from, int64_t to,
                           typename P::X* out) {
  constexpr int64_t PER_LANE = P::INPUTS / P::SUBSTEPS;
  for (int64_t k = from; k < to; k += WIDTH * PER_LANE) {
    store_transposed(rows, (to - k) / PER_LANE, (float*)out + k / PER_LANE * rows,
                     [&](int row) { return lanes_of<P>(x + row * stride, k, in_features); });
  }
}

template <class P>
static inline void arrange(const LinearArgs& args, int64_t first, int rows, int64_t from, int64_t to,
                           typename P::X* out) {
  int64_t offset = first * args.x_stride;
  if constexpr (P::INPUTS != P::SUBSTEPS) {
    arrange<P>((const bf16*)args.x + offset, args.x_stride, rows, args.in_features, from, to, out);
  } else {
    switch (args.x_type) {
      case Type::f32:
        return arrange<P>((const float*)args.x + offset, args.x_stride, rows, args.in_features, from, to, out);
      case Type::bf16:
        return arrange<P>((const bf16*)args.x + offset, args.x_stride, rows, args.in_features, from, to, out);
      case Type::f16:
        return arrange<P>((const f16*)args.x + offset, args.x_stride, rows, args.in_features, from, to, out);
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

template <class P>
static inline void product(const LinearArgs& args, const Worker& worker, Type stored_type) {
  using X = typename P::X;
  int64_t steps = (args.in_features + P::INPUTS - 1) / P::INPUTS;
  int64_t panels = round_up(args.out_features, PANEL) / PANEL;
  int64_t bytes = panel_bytes(args.format, args.in_features, args.group);
  int64_t max_rows = chunk_rows(args), chunks = (args.rows + max_rows - 1) / max_rows;
  float* sums = (float*)worker.scratch(max_rows * PANEL * 4 + steps * P::SUBSTEPS * sizeof(X));
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    int64_t start = args.rows * chunk / chunks, rows = args.rows * (chunk + 1) / chunks - start;
    Tiles tiles(rows);
    const X* x;
    if (rows > 1) {
      X* shared = (X*)args.shared;
      if (chunk) worker.barrier();  // all workers have finished reading the previous chunk
      Share share = share_of((steps + 15) / 16, worker);
      int64_t from = share.begin * 16 * P::INPUTS, to = (share.end * 16 < steps ? share.end * 16 : steps) * P::INPUTS;
      for (int64_t i = 0; i < tiles.count; i++) {
        arrange<P>(args, start + tiles.begin(i), tiles.rows(i), from, to,
                   shared + tiles.begin(i) * steps * P::SUBSTEPS);
      }
      worker.barrier();
      x = shared;
    } else if (args.x_type == stored_type && args.in_features % P::INPUTS == 0) {
      int64_t size = args.x_type == Type::f32 ? 4 : 2;
      x = (const X*)((const char*)args.x + start * args.x_stride * size);
    } else {
      X* scratch = (X*)(sums + max_rows * PANEL);
      arrange<P>(args, start, 1, 0, steps * P::INPUTS, scratch);
      x = scratch;
    }
    for (Chunks chunks(panels * tiles.count, worker); chunks.next();) {
      for (int64_t unit = chunks.begin; unit < chunks.end;) {
        int64_t panel = unit / tiles.count, begin = unit % tiles.count;
        int64_t end = begin + chunks.end - unit < tiles.count ? begin + chunks.end - unit : tiles.count;
        const char* weights = (const char*)args.weight + panel * bytes;
        multiply<P>(x, (const typename P::Weight*)weights, steps, tiles, begin, end, sums);
        for (int64_t row = tiles.begin(begin); row < tiles.begin(end); row++) {
          write(args, start + row, panel, sums + (row - tiles.begin(begin)) * PANEL);
        }
        unit += end - begin;
      }
    }
  }
}

template <class T, int INPUTS>
static inline void pack_panel(const T* data, int64_t out_features, int64_t in_features, int64_t depth, T* out) {
  for (int64_t from = 0; from < depth; from += 32) {  // a few cache lines of each row at a time
    int64_t to = from + 32 < depth ? from + 32 : depth;
    for (int64_t j = 0; j < PANEL; j++) {
      for (int64_t k = from; k < to; k++) {
        out[k / INPUTS * INPUTS * PANEL + j * INPUTS + k % INPUTS] =
            j < out_features && k < in_features ? data[j * in_features + k] : T{};
      }
    }
  }
}

template <class T, int INPUTS>
static inline void pack(const PackArgs& args, const Worker& worker) {
  int64_t panels = round_up(args.out_features, PANEL) / PANEL;
  int64_t depth = padded_in_features(args.format, args.in_features, args.group);
  Share share = share_of(panels, worker);
  for (int64_t panel = share.begin; panel < share.end; panel++) {
    const T* data = (const T*)args.data + panel * PANEL * args.in_features;
    pack_panel<T, INPUTS>(data, args.out_features - panel * PANEL, args.in_features, depth,
                          (T*)args.packed + panel * depth * PANEL);
  }
}

}  // namespace

size_t linear_dense_shared(const LinearArgs& args, int) {
  int64_t max_rows = chunk_rows(args), rows = args.rows < max_rows ? args.rows : max_rows;
  return rows > 1 ? rows * (args.in_features + 1) * sizeof(float) : 0;
}

void linear_dense(const LinearArgs& args, const Worker& worker) {
  switch (args.format) {
    case Format::f32: return product<Singles>(args, worker, Type::f32);
    case Format::f16: return product<Pairs<f16>>(args, worker, Type::f32);
    default: break;
  }
#if defined(__AVX512BF16__)
  // Not on Intel: its cores start one bf16 dot product in two cycles, but in the same time four float multiply-adds,
  // which do twice the work.
  if (args.x_type == Type::bf16 && !__builtin_cpu_is("intel")) return product<Dots>(args, worker, Type::bf16);
#endif
  product<Pairs<bf16>>(args, worker, Type::f32);
}

void pack_dense(const PackArgs& args, const Worker& worker) {
  switch (args.format) {
    case Format::f32: return pack<uint32_t, 1>(args, worker);
    default: return pack<uint16_t, 2>(args, worker);
  }
}

}  // namespace localllm::VARIANT
