// Prefill attention: rows with several queries, which attend to the cached positions of their row. Hopper only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../cpu/kernels.h"

namespace localllm::cuda {

struct ExtendArgs {
  Type type;  // dtype of query, cache and out: bf16 or f16
  int dim;    // 64 or 128
  void* out;  // [tokens, heads, dim], dense
  const void* query;
  const void *keys, *values;  // [pages * page_size, kv_heads, dim]; strides `slot` and `head` in elements
  const float* sinks;         // [heads], or null
  const int32_t *row_starts, *context_lens, *page_table;
  int64_t query_token, query_head, slot, head, table_row;
  int32_t* claims;  // [2]: number of claimed tiles, number of finished thread blocks; zero between calls
  int64_t tiles;    // lower bound of the number of tiles of all rows; sets the grid size
  int tokens, slots, rows, columns, kv_heads, group, window, page_size;
  int min_queries;  // rows with fewer queries are not computed
  float scale, cap;
};

constexpr int EXTEND_TILE_ROWS = 128;  // rows of a tile: its queries times the query heads per kv head

// True if the kernel supports pages of `size` positions.
constexpr bool extends_pages(int64_t size) {
  return size >= 8 && (size >= 128 ? size % 128 == 0 : 128 % size == 0);
}

void extend(const ExtendArgs& args, cudaStream_t stream);

}  // namespace localllm::cuda
