// Attention of long rows by tiles, where queries and cache are bf16; all else is the AVX-512 lane's.

#include "amx_attention.h"

namespace localllm::avx512 {
void attention(const AttentionArgs& args, const Worker& worker);
size_t attention_shared(const AttentionArgs& args, int workers);
}  // namespace localllm::avx512

namespace localllm::amx {

void attention(const AttentionArgs& args, const Worker& worker);
size_t attention_shared(const AttentionArgs& args, int workers);

namespace {

constexpr int64_t FEWEST_TOKENS = 32;

int64_t tokens_of(const AttentionArgs& args, int64_t row) { return args.row_starts[row + 1] - args.row_starts[row]; }

bool tiled(const AttentionArgs& args, int64_t row) {
  return args.type == Type::bf16 && args.cache_type == Type::bf16 && tokens_of(args, row) >= FEWEST_TOKENS;
}

int64_t block_tokens(const AttentionArgs& args) {
  int64_t group = args.heads / args.kv_heads;
  return group < QUERIES ? QUERIES / group : 1;
}

QueryBlock block_of(const AttentionArgs& args, int64_t row, int64_t block, int64_t kv_head) {
  int64_t all = tokens_of(args, row), most = block_tokens(args), first = block * most;
  QueryBlock own;
  own.row = row;
  own.kv_head = kv_head;
  own.token = args.row_starts[row] + first;
  own.tokens = all - first < most ? all - first : most;
  own.position = args.context_lens[row] - all + first;
  own.last_key = own.position + own.tokens;
  own.first_key = args.window && own.position >= args.window ? own.position - args.window + 1 : 0;
  return own;
}

// Blocks of long rows, handed out as workers become free; of each row the last first, which see most.
void long_rows(const AttentionArgs& args, const Worker& worker) {
  int64_t most = block_tokens(args), group = args.heads / args.kv_heads;
  uint8_t* memory = (uint8_t*)worker.scratch(BlockAttention::scratch(most, group, args.dim));
  configure_tiles(64);
  int64_t row = 0, before = 0;  // blocks × heads of the rows up to `row`
  for (;;) {
    int64_t item = __atomic_fetch_add((int64_t*)args.shared, 1, __ATOMIC_RELAXED);
    int64_t blocks = 0;
    for (; row < args.rows; before += blocks * args.kv_heads, row++) {
      blocks = tiled(args, row) ? (tokens_of(args, row) + most - 1) / most : 0;
      if (item - before < blocks * args.kv_heads) break;
    }
    if (row == args.rows) break;
    int64_t block = blocks - 1 - (item - before) / args.kv_heads, kv_head = (item - before) % args.kv_heads;
    QueryBlock own = block_of(args, row, block, kv_head);
    BlockAttention(args, own, most, memory).run();
  }
  tile_release();
}

}  // namespace

void attention(const AttentionArgs& args, const Worker& worker) {
  bool some = false;
  for (int64_t row = 0; row < args.rows; row++) some |= tiled(args, row);
  if (!some) return avx512::attention(args, worker);
  if (worker.index == 0) *(int64_t*)args.shared = 0;
  worker.barrier();
  long_rows(args, worker);
  for (int64_t row = 0; row < args.rows;) {  // neighbouring rows that are left, together
    int64_t end = row;
    while (end < args.rows && !tiled(args, end)) end++;
    if (end > row) {
      AttentionArgs rest = args;
      rest.row_starts += row;
      rest.context_lens += row;
      rest.page_table += row * args.pages_per_row;
      rest.rows = end - row;
      worker.barrier();  // the memory that all share is used anew
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
