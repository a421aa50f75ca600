// Products with f32, bf16 or f16 weights.
//
// 1. All workers rearrange x into tiles [steps, SUBSTEPS, rows of the tile] in `shared`, the order of the inner loop.
// 2. The workers divide the panel × tile items. A worker processes a panel in blocks that stay in the L1 or L2 cache
//    while it multiplies all tiles with them, so it reads the weights from memory only once.

#include "dense_panel.h"
#include "linear.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t CHUNK_ROWS = 240;       // maximum rows of a chunk; its sums for one panel need 30 KiB
constexpr int64_t CHUNK_BYTES = 8 << 20;  // maximum size of a rearranged chunk, which stays in the L3 cache

static inline int64_t chunk_rows(const LinearArgs& args) {
  int64_t fit = CHUNK_BYTES / 4 / (args.in_features + 1) / MAX_TILE_ROWS * MAX_TILE_ROWS;
  int64_t max_rows = CHUNK_ROWS / MAX_TILE_ROWS * MAX_TILE_ROWS;
  return fit < MAX_TILE_ROWS ? MAX_TILE_ROWS : fit < max_rows ? fit : max_rows;
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
  if (uses_dots(args.x_type)) return product<Dots>(args, worker, Type::bf16);
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
