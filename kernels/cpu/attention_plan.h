// How the rows of a step are cut into work for attention. The cut of a row depends on that row alone, so its answer is
// the same bits alone or in a batch, with any number of workers.
//
//   a row's keys       first ........................................ context
//                      | piece 0 | piece 1 | ... each summed on its own, merged at the end
//   a row's tokens     | block 0 | block 1 | ... long rows only, and then the keys are one piece
#pragma once

#include "vec.h"

namespace localllm::LANE {

constexpr int64_t QUERIES = 96;     // of one key-value head in a block, about
constexpr int64_t SHARED_BY = 8;    // at most so many queries take their keys straight from the pages
constexpr int64_t SHORT_PIECE = 128, MOST_SHORT_PIECES = 32;  // of rows with one token
constexpr int64_t LONG_PIECE = 1024, MOST_LONG_PIECES = 8;    // of the others: more queries to store and merge

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

struct Row {
  int64_t index, token, tokens;  // token: its first in the batch
  int64_t first, context;        // keys [first, context) are seen by some token
  int64_t blocks, block_tokens;
  int64_t pieces, piece_keys;
  bool streams;  // by decode(), which reads each key once, as it lies; else by extend(), which rearranges them first
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
  row.streams = row.tokens == 1 && group <= SHARED_BY;
  int64_t keys = row.context - row.first;
  int64_t least = row.tokens == 1 ? SHORT_PIECE : LONG_PIECE;
  int64_t most = row.tokens == 1 ? MOST_SHORT_PIECES : MOST_LONG_PIECES;
  row.piece_keys = keys;
  row.pieces = 1;
  if (row.blocks == 1 && keys > least) {
    row.pieces = (keys + least - 1) / least;
    if (row.pieces > most) row.pieces = most;
    row.piece_keys = round_up((keys + row.pieces - 1) / row.pieces, 32);
    row.pieces = (keys + row.piece_keys - 1) / row.piece_keys;
  }
  return row;
}

struct Keys {
  int64_t begin, end;
};

static inline Keys keys_of(const Row& row, int64_t piece) {
  int64_t begin = row.first + piece * row.piece_keys, end = begin + row.piece_keys;
  return {begin, end < row.context ? end : row.context};
}

// Where positions [position, position + count) of a row lie in the pages, as offsets of their first key-value head;
// the rest of offsets[0, size) repeats the last of them.
static inline void locate(const AttentionArgs& args, const Row& row, int64_t position, int64_t count, int64_t size,
                          int64_t* offsets) {
  const int32_t* pages = args.page_table + row.index * args.pages_per_row;
  int64_t page = position / args.page_size, place = position % args.page_size, width = args.kv_heads * args.dim;
  for (int64_t i = 0; i < count; i++) {
    offsets[i] = (pages[page] * args.page_size + place) * width;
    if (++place == args.page_size) page++, place = 0;
  }
  for (int64_t i = count; i < size; i++) offsets[i] = offsets[count - 1];
}

// Rows cut into pieces leave for each piece, token and head its largest score, the sum of its weights and their sum of
// values, in floats, to be merged when all are there.
static inline int64_t partial_floats(const AttentionArgs& args) { return args.dim + 2; }
static inline int64_t partial_floats(const AttentionArgs& args, const Row& row) {
  return row.pieces > 1 ? row.pieces * row.tokens * args.heads * partial_floats(args) : 0;
}
static inline float* partial_at(const AttentionArgs& args, const Row& row, float* partials, int64_t piece,
                                int64_t token, int64_t head) {
  return partials + ((piece * row.tokens + token) * args.heads + head) * partial_floats(args);
}

}  // namespace localllm::LANE
