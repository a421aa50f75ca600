// Prompt attention: rows with several queries, over what the cache holds of them and themselves. Hopper only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../cpu/kernels.h"

namespace localllm::cuda {

struct ExtendArgs {
  Type type;  // of query, cache and out: bf16 or f16
  int dim;    // 64 or 128
  void* out;  // [tokens, heads, dim], dense
  const void* query;
  const void *keys, *values;  // [pages * page_size, kv_heads, dim], slots `slot` elements apart, heads `head`
  const float* sinks;         // [heads], or null
  const int32_t *row_starts, *context_lens, *page_table;
  int64_t query_token, query_head, slot, head, table_row;
  int32_t* claims;  // tiles that are claimed, and blocks that found no more. Zero between calls
  int64_t tiles;    // of all rows, at least
  int tokens, slots, rows, columns, kv_heads, group, window, page_size;
  int fewest;  // queries; rows with fewer are left alone
  float scale, cap;
};

constexpr int EXTEND_LINES = 128;  // of a tile: its queries times the heads that share a kv head

// Whether pages of so many positions can be read.
constexpr bool extends_pages(int64_t size) {
  return size >= 8 && (size >= 128 ? size % 128 == 0 : 128 % size == 0);
}

void extend(const ExtendArgs& args, cudaStream_t stream);

}  // namespace localllm::cuda
