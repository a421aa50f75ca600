// Prefill attention with mma.sync: sizes, tiles, and the layout of shared memory.
#pragma once

#include <type_traits>

#include "prefill.h"
#include "mma.cuh"

namespace localllm::cuda {
namespace {

// The sizes of a kernel. DIM: head size. BLOCK: positions of the cache per iteration. MATRICES: matrices of 16 tile rows
// per warp. RESIDENT: resident thread blocks per multiprocessor that the register allocation permits.
template <int DIM_, int BLOCK_, int WARPS_, int MATRICES_, int RESIDENT_>
struct Tiling {
  static constexpr int DIM = DIM_, BLOCK = BLOCK_, WARPS = WARPS_, MATRICES = MATRICES_, RESIDENT = RESIDENT_;
  static constexpr int WARP_ROWS = 16 * MATRICES, ROWS = WARP_ROWS * WARPS, THREADS = 32 * WARPS;
  static constexpr int EIGHTS = BLOCK / 8;  // groups of 8 positions of a block
  static_assert(DIM % 16 == 0 && BLOCK % 16 == 0 && (EIGHTS % WARPS == 0 || WARPS % EIGHTS == 0));
};

// The copies of a block of keys or values. In one pass, a warp copies 64 bytes of each of 8 positions, 16 bytes per
// lane. A warp copies all columns of EIGHTS groups of 8 positions; or SHARING warps share the columns of one group.
template <class S, class C>
struct Copies {
  static constexpr int ELEMENTS = 16 / sizeof(C), ROW_COPIES = S::DIM / ELEMENTS;
  static constexpr int EIGHTS = S::EIGHTS > S::WARPS ? S::EIGHTS / S::WARPS : 1;
  static constexpr int SHARING = S::WARPS > S::EIGHTS ? S::WARPS / S::EIGHTS : 1;
  static constexpr int COLUMNS = (ROW_COPIES + 4 * SHARING - 1) / (4 * SHARING);  // passes per group
  static constexpr bool ALL_COLUMNS = ROW_COPIES % (4 * SHARING) == 0;
  static constexpr int BYTES = EIGHTS * COLUMNS * S::THREADS * 16;  // of all copies, also those of missing columns
};

// `count` consecutive queries of a sequence, with all query heads of one kv head.
struct Tile {
  int row, token, count;  // token: index of the first query; count: 0 if there is no such tile
  int before, end;        // positions of the sequence before the first query, and up to the last query
  int low;                // first position that a query sees
  int kv_head;
};

template <class S, class C>
struct Shared {
  using H = typename Operand<C>::Type;
  static constexpr bool WIDENED = sizeof(C) == 1;  // true: the cache is float8_e4m3
  H query[S::ROWS * S::DIM];                       // and then the outputs
  H keys[S::BLOCK * S::DIM], values[S::BLOCK * S::DIM];
  Tile tile;
  uint4 narrow[WIDENED ? 2 : 0][Copies<S, C>::BYTES / 16];  // keys and values in float8
};

__device__ inline uint32_t shared_address(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

// Matrices in shared memory have DIM elements per row. The order of a row's groups of 8 elements depends on the row, so
// that ldmatrix reads 8 rows without bank conflicts: group i is at place i ^ order, in a span of SPAN groups.
template <int DIM>
struct Swizzle {
  static constexpr int SPAN = DIM % 64 == 0 ? 8 : DIM % 32 == 0 ? 4 : 2;
  static __device__ int order(int row) { return row / (8 / SPAN) % SPAN; }
  static __device__ int offset(int row, int eight) { return row * DIM + (eight ^ order(row)) * 8; }  // elements
};

// The index of the thread. Kernels with several matrices per warp need nearly all registers: they read the index again
// from the hardware, so that values derived from it take no register in the main loop.
template <class S>
__device__ inline int thread_index() {
  if constexpr (S::MATRICES == 1) return threadIdx.x;
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The addresses of a lane for ldmatrix: row `row` + 8 i, groups `eight` + 2 k.
template <int DIM>
struct Lane {
  static constexpr int SPAN = Swizzle<DIM>::SPAN;
  uint32_t start;
  __device__ Lane(const void* matrix, int row, int eight)
      : start(shared_address(matrix) + row * DIM * 2 + (eight ^ Swizzle<DIM>::order(row)) * 16) {}
  // A span begins at a multiple of its bytes, so the exclusive or stays in the span.
  __device__ uint32_t address(int rows, int k) const {
    return (start ^ k % (SPAN / 2) * 32) + k / (SPAN / 2) * SPAN * 16 + rows * DIM * 2;
  }
};

// Tile number `target`. The tiles of a row are in descending order: those with the longest context come first.
__device__ inline Tile find_tile(const PrefillArgs& args, int kv_head, int target, int tile_queries, int lane) {
  int tiles_before = 0;
  for (int base = 0; base < args.rows; base += 32) {
    const int row = base + lane;
    int start = 0, queries = 0;
    if (row < args.rows) {
      start = args.row_starts[row];
      queries = args.row_starts[row + 1] - start;
    }
    const int tiles = queries >= args.min_queries ? (queries + tile_queries - 1) / tile_queries : 0;
    int end = tiles;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(ALL, end, distance);
      if (lane >= distance) end += other;
    }
    const unsigned containing = __ballot_sync(ALL, tiles_before + end > target);
    if (containing) {
      const int from = __ffs(containing) - 1;
      const int first = __shfl_sync(ALL, tiles_before + end - 1 - target, from) * tile_queries;
      start = __shfl_sync(ALL, start, from);
      queries = __shfl_sync(ALL, queries, from);
      const int count = min(tile_queries, queries - first);
      const int before = max(args.context_lens[base + from] - queries, 0) + first;
      const int low = args.window > 0 ? max(before - args.window + 1, 0) : 0;
      return {base + from, start + first, count, before, before + count, low, kv_head};
    }
    tiles_before += __shfl_sync(ALL, end, 31);
  }
  return {};
}

}  // namespace
}  // namespace localllm::cuda
