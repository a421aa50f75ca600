// The tile sizes of a product of 1 to 16 rows, from its shape and the limits of the GPU. Plain C++, so that tests need
// no GPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace localllm::cuda {

constexpr int LOG_THREADS = 9, THREADS = 1 << LOG_THREADS, WARPS = THREADS / 32, MAX_SLOTS = 12;
constexpr int VECTORS_PER_THREAD = 4;     // vectors of 8 activations per thread that PreparedRows keeps in registers
constexpr int PREPARED_LIMIT = 32 << 10;  // bytes: limit of the activations that every block prepares in shared memory
constexpr int BUDGET = 110 << 10;         // bytes of shared memory per block: a block of the next kernel fits beside it
constexpr int TILE_END = 32 << 10;        // bytes: see outputs_of_tile
constexpr int STATIC = 1 << 10;           // bytes of shared memory for static variables and the driver

// The properties of a weight format (formats.cuh) that a plan depends on.
struct Traits {
  int x_bytes, vectors, chunk, records;
  bool rounded_in_groups;

  // True if activations take so many registers that large tiles would spill.
  constexpr bool heavy() const { return vectors * x_bytes == 8; }
  // True if tiles of 32 outputs and steps of several chunks are compiled; not for small groups, which are rare.
  constexpr bool many_tiles() const { return records <= 1 && !heavy(); }
  // Chunks that a warp reads in one step, if a tile has 8 outputs and 8 * nt rows.
  constexpr int depth(int nt) const { return many_tiles() && nt == 1 && vectors < 4 ? 2 : 1; }
};

struct Shape {
  int rows, out_features, subgroups, group;
  int64_t row_bytes;
  bool gated;
};

struct Limits {
  int processors, shared;  // multiprocessors; bytes of shared memory per block
};

// The sizes of one launch: tiles of 8 * j outputs, p chunks per step of a warp, nt groups of 8 rows.
struct TileSizes {
  int j, p, nt, slots, slot_bytes, sum_buffers, shared;

  bool fits() const { return slots >= 2; }
};

// Bytes of a row of activations that every block prepares in shared memory; 0: they come through the ring.
constexpr int prepared_pitch(const Traits& f, const Shape& a) {
  const int64_t chunks = (a.row_bytes + 63) / 64, pitch = chunks * f.chunk * f.x_bytes + 16;
  const bool groups = !f.rounded_in_groups || a.group == 32 || a.group == 64 || a.group == 128;
  const int rows = a.rows == 1 ? 1 : a.rows == 2 ? 2 : a.rows <= 4 ? 4 : 8;
  const bool in_registers = chunks * f.chunk <= VECTORS_PER_THREAD * 8 * THREADS / rows;
  return a.rows <= 8 && groups && in_registers && a.rows * pitch <= PREPARED_LIMIT ? int(pitch) : 0;
}

// Blocks of 8 outputs per tile: 4, 2 or 1; with gates 4 or 2. A multiprocessor computes its tiles one after the other.
// The end of a tile, where its warps wait for each other, takes as long as reading TILE_END bytes.
inline int outputs_of_tile(int64_t blocks, bool gated, int processors, int64_t row_bytes) {
  auto cost = [&](int64_t tile_blocks) {  // bytes that the busiest multiprocessor could read in the time of all its tiles
    int64_t tiles = (blocks + tile_blocks - 1) / tile_blocks, rounds = (tiles + processors - 1) / processors;
    return rounds * (tile_blocks * 8 * row_bytes + TILE_END);
  };
  if (cost(4) <= std::min(cost(2), gated ? cost(2) : cost(1))) return 4;
  return gated || cost(2) <= cost(1) ? 2 : 1;
}

// The shared memory of tiles of 8 * j outputs. Uses two buffers for partial sums if they are small and fit.
inline TileSizes tile_sizes(const Traits& f, const Shape& a, int pitch, int limit, int j, int p) {
  const int nt = a.rows <= 8 ? 1 : 2, buffer_bytes = WARPS * j * a.rows * 8 * 4;
  TileSizes sizes{j, p, nt, 0, THREADS * j * p * (16 + 4 * f.records), 0, 0};
  int prepared = 0;
  if (pitch) prepared = a.rows * (pitch + 4) + (f.rounded_in_groups ? a.rows * a.subgroups * 4 : 0);
  else sizes.slot_bytes += THREADS * p * nt * (f.vectors * 8 * f.x_bytes + (f.rounded_in_groups ? 4 * f.records : 0));
  for (sizes.sum_buffers = buffer_bytes <= 8 << 10 ? 2 : 1; sizes.sum_buffers > 0; sizes.sum_buffers--) {
    const int max_shared = limit - STATIC, others = sizes.sum_buffers * buffer_bytes + prepared;
    int available = std::min(max_shared, f.records == 0 ? BUDGET : max_shared) - others;
    if (available < 3 * sizes.slot_bytes) available = max_shared - others;
    sizes.slots = std::max(0, std::min(MAX_SLOTS, available / sizes.slot_bytes));
    sizes.shared = sizes.slots * sizes.slot_bytes + others;
    if (sizes.fits()) break;
  }
  return sizes;
}

// The best tiles that fit in shared memory, else TileSizes whose fits() is false. With gates, a tile has the gates and
// the values that they multiply.
inline TileSizes tile_sizes(const Traits& f, const Shape& a, int pitch, const Limits& gpu) {
  const int tile_blocks = outputs_of_tile((a.out_features + 7) / 8, a.gated, gpu.processors, a.row_bytes);
  const int depth = f.depth(a.rows <= 8 ? 1 : 2);
  TileSizes sizes{};
  auto try_sizes = [&](int j, int p) { return (sizes = tile_sizes(f, a, pitch, gpu.shared, j, p)).fits(); };
  if (f.many_tiles() && tile_blocks == 4 && try_sizes(4, 1)) return sizes;
  if (f.many_tiles() && tile_blocks == 1 && try_sizes(1, depth)) return sizes;
  if (!try_sizes(2, 1) && !a.gated) try_sizes(1, depth);
  return sizes;
}

// Rows per launch: all, or half of them if shared memory is too small for all; each launch reads all weights. 0: half
// of the rows do not fit either. `pitch` (see prepared_pitch) applies to both halves.
inline int rows_per_launch(const Traits& f, const Shape& a, int pitch, const Limits& gpu) {
  if (tile_sizes(f, a, pitch, gpu).fits()) return a.rows;
  Shape half = a;
  half.rows = (a.rows + 1) / 2;
  return half.rows < a.rows && tile_sizes(f, half, pitch, gpu).fits() ? half.rows : 0;
}

// True if the GPU can compute the product. A fused norm requires activations that every block prepares.
inline bool fits(const Traits& f, const Shape& a, bool normed, const Limits& gpu) {
  const int pitch = prepared_pitch(f, a);
  return (pitch || !normed) && rows_per_launch(f, a, pitch, gpu) > 0;
}

// Subgroups: inputs of an output with one stored scale (int4: and zero point). subgroups: number per output.
struct Subgroups {
  int chunks_per_subgroup, subgroups;
};
constexpr Subgroups subgroups_of(const Traits& f, int64_t in_features, int64_t group) {
  const int64_t subgroup = f.chunk == 128 ? 128 / std::max(f.records, 1) : std::min(group, in_features);
  return {int((subgroup + f.chunk - 1) / f.chunk), int((in_features + subgroup - 1) / subgroup)};
}

// The traits of the weight formats (products/product.h).
constexpr Traits BF16{2, 1, 32, 0, false}, INT8{1, 2, 64, 0, false};
constexpr Traits e4m3(bool grouped) { return {2, 2, 64, grouped, false}; }
constexpr Traits nibbles(bool wide, int per_chunk) { return {wide ? 2 : 1, 4, 128, per_chunk, !wide}; }

}  // namespace localllm::cuda
