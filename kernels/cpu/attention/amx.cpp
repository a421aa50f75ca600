// Attention of long rows with AMX tiles, for bf16 queries and cache, and values as wide as the keys. Other rows use the
// AVX-512 kernels.

#include "amx.h"

namespace localllm::avx512 {
void attention(const AttentionArgs& args, const Worker& worker);
size_t attention_shared(const AttentionArgs& args, int workers);
}  // namespace localllm::avx512

namespace localllm::amx {

void attention(const AttentionArgs& args, const Worker& worker);
size_t attention_shared(const AttentionArgs& args, int workers);

namespace {

constexpr int64_t MIN_TOKENS = 32;

int64_t tokens_of(const AttentionArgs& args, int64_t row) { return args.row_starts[row + 1] - args.row_starts[row]; }

bool uses_tiles(const AttentionArgs& args, int64_t row) {
  bool supported = args.type == Type::bf16 && args.cache_type == Type::bf16 && args.value_dim == args.dim;
  return supported && tokens_of(args, row) >= MIN_TOKENS;
}

int64_t block_tokens(const AttentionArgs& args) {
  int64_t group = args.heads / args.kv_heads;
  return group < QUERIES ? QUERIES / group : 1;
}

QueryBlock block_of(const AttentionArgs& args, int64_t row, int64_t block, int64_t kv_head) {
  int64_t row_tokens = tokens_of(args, row), max_tokens = block_tokens(args), first = block * max_tokens;
  QueryBlock out;
  out.row = row;
  out.kv_head = kv_head;
  out.token = args.row_starts[row] + first;
  out.tokens = row_tokens - first < max_tokens ? row_tokens - first : max_tokens;
  out.position = args.context_lens[row] - row_tokens + first;
  out.last_key = out.position + out.tokens;
  out.first_key = args.window && out.position >= args.window ? out.position - args.window + 1 : 0;
  return out;
}

// Computes the blocks of long rows. A worker takes the next block from a shared counter. The last block of a row comes
// first, because it attends to the most keys.
void long_rows(const AttentionArgs& args, const Worker& worker) {
  int64_t max_tokens = block_tokens(args), group = args.heads / args.kv_heads;
  uint8_t* memory = (uint8_t*)worker.scratch(BlockAttention::scratch(max_tokens, group, args.dim));
  configure_tiles(64);
  int64_t row = 0;
  int64_t before = 0;  // number of items (block, kv head) of the rows before `row`
  for (;;) {
    int64_t item = __atomic_fetch_add((int64_t*)args.shared, 1, __ATOMIC_RELAXED);
    int64_t blocks = 0;
    for (; row < args.rows; before += blocks * args.kv_heads, row++) {
      blocks = uses_tiles(args, row) ? (tokens_of(args, row) + max_tokens - 1) / max_tokens : 0;
      if (item - before < blocks * args.kv_heads) break;
    }
    if (row == args.rows) break;
    int64_t block = blocks - 1 - (item - before) / args.kv_heads, kv_head = (item - before) % args.kv_heads;
    BlockAttention(args, block_of(args, row, block, kv_head), max_tokens, memory).run();
  }
  tile_release();
}

}  // namespace

void attention(const AttentionArgs& args, const Worker& worker) {
  bool any_tiled = false;
  for (int64_t row = 0; row < args.rows; row++) any_tiled |= uses_tiles(args, row);
  if (!any_tiled) return avx512::attention(args, worker);
  if (worker.index == 0) *(int64_t*)args.shared = 0;
  worker.barrier();
  long_rows(args, worker);
  for (int64_t row = 0; row < args.rows;) {  // one AVX-512 call for all adjacent rows that do not use tiles
    int64_t end = row;
    while (end < args.rows && !uses_tiles(args, end)) end++;
    if (end > row) {
      AttentionArgs rest = args;
      rest.row_starts += row;
      rest.context_lens += row;
      rest.page_table += row * args.pages_per_row;
      rest.rows = end - row;
      worker.barrier();  // all workers have finished with the shared memory
      avx512::attention(rest, worker);
    }
    row = end + 1;
  }
}

size_t attention_shared(const AttentionArgs& args, int workers) {
  size_t rest = avx512::attention_shared(args, workers);
  return rest > 64 ? rest : 64;
}

}  // namespace localllm::amx
