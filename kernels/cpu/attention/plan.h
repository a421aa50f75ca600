// Division of the rows of a step into work items for attention. The division of a row depends only on that row, so its
// output is bitwise the same alone and in a batch, for any number of workers.
//
//   keys of a row      first ........................................ context
//                      | chunk 0 | chunk 1 | ... computed separately and merged at the end
//   tokens of a row    | block 0 | block 1 | ... only in long rows, whose keys are one chunk
#pragma once

#include "../vectors/vec.h"

namespace localllm::VARIANT {

constexpr int64_t QUERIES = 96;             // approximate number of queries per block and kv head
constexpr int64_t MAX_DECODE_GROUP = 8;     // decode() supports up to 8 query heads per kv head
constexpr int64_t MIN_DECODE_CHUNK = 128;   // smallest number of keys of a chunk in rows of one token or one kv head
constexpr int64_t MAX_DECODE_CHUNKS = 32;
// Smallest number of keys of a chunk in longer rows, whose chunks have more results to merge.
constexpr int64_t MIN_PREFILL_CHUNK = 1024;
constexpr int64_t MAX_PREFILL_CHUNKS = 8;

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

struct Row {
  int64_t index, token, tokens;  // index of the row; index of its first token in the batch; number of its tokens
  int64_t first, context;        // its tokens attend to the keys [first, context)
  int64_t blocks, block_tokens;
  int64_t chunks, chunk_keys;
  bool decodes;  // computed by decode(), which reads keys from the pages; false: by prefill(), which rearranges keys
};

static inline Row row_of(const AttentionArgs& args, int64_t index) {
  int64_t group = args.heads / args.kv_heads;
  Row row;
  row.index = index;
  row.token = args.row_starts[index];
  row.tokens = args.row_starts[index + 1] - row.token;
  row.context = args.context_lens[index];
  int64_t oldest = row.context - row.tokens + 1 - args.window;
  row.first = args.window > 0 && oldest > 0 ? oldest : 0;
  row.block_tokens = group < QUERIES ? QUERIES / group : 1;
  row.blocks = (row.tokens + row.block_tokens - 1) / row.block_tokens;
  row.decodes = row.tokens == 1 && group <= MAX_DECODE_GROUP && args.value_dim == args.dim;
  int64_t keys = row.context - row.first;
  bool small_chunks = row.tokens == 1 || args.kv_heads == 1;  // with one kv head, only chunks divide a short row
  int64_t min_keys = small_chunks ? MIN_DECODE_CHUNK : MIN_PREFILL_CHUNK;
  int64_t max_chunks = small_chunks ? MAX_DECODE_CHUNKS : MAX_PREFILL_CHUNKS;
  row.chunk_keys = keys;
  row.chunks = 1;
  if (row.blocks == 1 && keys > min_keys) {
    row.chunks = (keys + min_keys - 1) / min_keys;
    if (row.chunks > max_chunks) row.chunks = max_chunks;
    row.chunk_keys = round_up((keys + row.chunks - 1) / row.chunks, 32);
    row.chunks = (keys + row.chunk_keys - 1) / row.chunk_keys;
  }
  return row;
}

struct Keys {
  int64_t begin, end;
};

static inline Keys keys_of(const Row& row, int64_t chunk) {
  int64_t begin = row.first + chunk * row.chunk_keys, end = begin + row.chunk_keys;
  return {begin, end < row.context ? end : row.context};
}

// offsets[i] = offset in the pages, in elements, of the first kv head of position `position` + i of a row, for i in [0,
// count). The elements offsets[count, size) repeat the last offset.
static inline void locate(const AttentionArgs& args, const Row& row, int64_t position, int64_t count, int64_t size,
                          int64_t* offsets) {
  const int32_t* pages = args.page_table + row.index * args.pages_per_row;
  int64_t page = position / args.page_size, offset = position % args.page_size, width = args.kv_heads * args.dim;
  for (int64_t i = 0; i < count; i++) {
    offsets[i] = (pages[page] * args.page_size + offset) * width;
    if (++offset == args.page_size) {
      page++;
      offset = 0;
    }
  }
  for (int64_t i = count; i < size; i++) offsets[i] = offsets[count - 1];
}

// If a row has several chunks, each chunk stores a partial result for every token and head: the largest score, the sum
// of the softmax weights, and the weighted sum of values, in floats. merge() combines them.
static inline int64_t partial_floats(const AttentionArgs& args) { return args.value_dim + 2; }
static inline int64_t partial_floats(const AttentionArgs& args, const Row& row) {
  return row.chunks > 1 ? row.chunks * row.tokens * args.heads * partial_floats(args) : 0;
}
static inline float* partial_of(const AttentionArgs& args, const Row& row, float* partials, int64_t chunk,
                                int64_t token, int64_t head) {
  return partials + ((chunk * row.tokens + token) * args.heads + head) * partial_floats(args);
}

}  // namespace localllm::VARIANT
