// Prefill attention: rows with several queries, which attend to the cached positions of their row. `prefill` is only for
// Hopper.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../cpu/kernels.h"

namespace localllm::cuda {

struct PrefillArgs {
  Type type;  // dtype of query, cache and out: bf16 or f16
  bool e4m3;  // true: the cache is float8_e4m3fn; only prefill_mma supports it
  int dim;    // head size
  void* out;  // [tokens, heads, dim], dense
  const void* query;
  const void *keys, *values;  // [pages * page_size, kv_heads, dim]; strides `slot` and `head` in elements
  const float* sinks;         // [heads], or null
  const int32_t *row_starts, *context_lens, *page_table;
  int64_t query_token, query_head, slot, head, table_row;
  int32_t* claims;  // [2]: number of claimed tiles, number of finished thread blocks; zero between calls
  int64_t tiles;    // lower bound of the number of tiles of all rows; sets the grid size
  int tokens, slots, rows, columns, kv_heads, group, window, page_size, page_shift;  // page_shift: only for prefill_mma, log2 of page_size
  int min_queries;  // rows with fewer queries are not computed
  float scale, cap;
};

constexpr int PREFILL_TILE_ROWS = 128;  // rows of a tile: its queries times the query heads per kv head

// True if the kernel supports pages of `size` positions.
constexpr bool supports_pages(int64_t size) {
  return size >= 8 && (size >= 128 ? size % 128 == 0 : 128 % size == 0);
}

void prefill(const PrefillArgs& args, cudaStream_t stream);

// The rows of a tile of prefill_mma. Only heads of up to 128 dims have large tiles.
constexpr int MMA_SMALL_TILE = 64, MMA_LARGE_TILE = 128;
constexpr bool supports_tile(int dim, int64_t rows) {
  return rows == MMA_SMALL_TILE || (rows == MMA_LARGE_TILE && dim <= 128);
}

// The kernel with mma.sync, for every GPU. `tiles` is the number of tiles of `tile_rows` rows.
void prefill_mma(const PrefillArgs& args, int tile_rows, cudaStream_t stream);

}  // namespace localllm::cuda
