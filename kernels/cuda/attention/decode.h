// Decode attention: rows with one query.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../cpu/kernels.h"
#include "../device/counters.h"

namespace localllm::cuda {

struct DecodeArgs {
  Type type;  // dtype of query, out and cache: bf16 or f16
  bool e4m3;  // true: the cache is float8_e4m3fn
  int dim;    // head size, see supports_dim
  void* out;  // [tokens, heads, dim], dense
  const void* query;
  const void *keys, *values;    // [pages * page_size, kv_heads, dim]; strides `slot` and `head` in elements
  const float* sinks;           // [heads], or null
  const int32_t *row_starts, *context_lens, *page_table;
  // Partial results of rows that span chunks. Index 1 of the dimension of size 2: the row begins in this chunk; index
  // 0: the row began in an earlier chunk.
  float* partial;  // [chunks, kv_heads, 2, group, padded_dim(dim)]
  float* stats;    // [chunks, kv_heads, 2, group, 2]
  int32_t* arrivals;  // [rows, kv_heads]: number of complete partial results; zero between calls
  int64_t query_token, query_head, slot, head, table_row;
  int rows, chunks, kv_heads, group, window, page_shift;
  int columns, pages;  // columns of the page table; pages of the cache
  float scale, cap;
};

// True for the head sizes of the kernels with mma.sync: decode_attention and prefill_attention_mma.
constexpr bool supports_dim(int64_t dim) {
  return dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 192 || dim == 256;
}
// The head size that partial results have in memory.
constexpr int padded_dim(int dim) { return (dim + 63) / 64 * 64; }
template <int DIM>
constexpr int PADDED = padded_dim(DIM);

constexpr int MAX_GROUP = 8;  // limit of query heads per kv head

// Computes rows with one query; does not write the outputs of other rows.
void decode(DecodeArgs args, cudaStream_t stream);

// The number of chunks that fills the current device.
int decode_chunks(int64_t rows, int64_t kv_heads, int dim, bool e4m3);

}  // namespace localllm::cuda
