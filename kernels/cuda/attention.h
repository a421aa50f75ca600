// Decode attention: rows with one query.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../cpu/kernels.h"
#include "counters.h"

namespace localllm::cuda {

struct DecodeArgs {
  Type type;  // of query and out, and of the cache: bf16 or f16
  bool e4m3;  // the cache is of float8_e4m3fn instead
  int dim;    // 64 or 128
  void* out;  // [tokens, heads, dim], dense
  const void* query;
  const void *keys, *values;    // [pages * page_size, kv_heads, dim], slots `slot` elements apart, heads `head`
  const float* sinks;           // [heads], or null
  const int32_t *row_starts, *context_lens, *page_table;
  float* partial;  // [chunks, kv_heads, 2, group, dim]
  float* stats;    // [chunks, kv_heads, 2, group, 2]
  int32_t* arrivals;  // [rows, kv_heads]: parts that are done. Zero between calls
  int64_t query_token, query_head, slot, head, table_row;
  int rows, chunks, kv_heads, group, window, page_shift;
  float scale, cap;
};

constexpr int MOST_SHARING = 8;  // query heads of a kv head

// Rows with more queries are left alone.
void decode(DecodeArgs args, cudaStream_t stream);

// Into how many the cache is shared out, so that the current device is filled.
int decode_chunks(int64_t rows, int64_t kv_heads, int dim, bool e4m3);

}  // namespace localllm::cuda
