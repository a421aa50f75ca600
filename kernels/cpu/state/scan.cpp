// The recurrences of Gated DeltaNet and Mamba2. A work item is one head of one row. Few tokens update the state in its
// slot one after the other; this reads and writes the state about once. More tokens are computed in chunks.
#include "chunk.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t FEW = 8;  // tokens of a row up to which chunks are slower

template <bool DELTA>
void few_tokens(const ScanArgs& args, const StateRow& row, int64_t head, float* memory) {
  float *query = memory, *key = query + args.key_dim, *value = key + args.key_dim, *work = value + args.value_dim;
  float* state = row.stored ? row.stored : work + 2 * args.value_dim;
  if (!row.continues) copy_floats(nullptr, state, args.key_dim * args.value_dim);
  for (int64_t token = row.begin; token < row.end; token++) {
    load_token(args, token, head, query, key, value);
    update<DELTA>(args, state, query, key, value, factors_of(args, token, head), args.skip ? args.skip[head] : 0.0f,
                  work);
    narrow(args.type, value, 1.0f, args.out, (token * args.heads + head) * args.value_dim, args.value_dim);
  }
}

void many_tokens(const ScanArgs& args, const StateRow& row, int64_t head, float* memory) {
  Workspace work = Workspace::of(memory, args);
  copy_floats(nullptr, work.state.data, work.keys * work.values);
  for (int64_t i = 0; row.continues && i < args.key_dim; i++)
    copy_floats(row.stored + i * args.value_dim, work.state.row(i), args.value_dim);
  for (int64_t token = row.begin; token < row.end; token += CHUNK)
    scan_chunk(args, work, token, row.end - token < CHUNK ? row.end - token : CHUNK, head);
  for (int64_t i = 0; row.stored && i < args.key_dim; i++)
    copy_floats(work.state.row(i), row.stored + i * args.value_dim, args.value_dim);
}

}  // namespace

void scan(const ScanArgs& args, const Worker& worker) {
  int64_t size = args.key_dim * args.value_dim, few = 2 * args.key_dim + 3 * args.value_dim + size;
  int64_t many = Workspace::floats(args);
  float* memory = (float*)worker.scratch((few > many ? few : many) * sizeof(float));
  for (Chunks chunks(args.rows.rows * args.heads, worker); chunks.next();)
    for (long item = chunks.begin; item < chunks.end; item++) {
      int64_t head = item % args.heads;
      StateRow row = state_row(args.rows, item / args.heads, args.states, args.heads * size);
      if (row.stored) row.stored += head * size;
      if (row.end - row.begin > FEW) many_tokens(args, row, head, memory);
      else if (args.beta) few_tokens<true>(args, row, head, memory);
      else few_tokens<false>(args, row, head, memory);
    }
}

}  // namespace localllm::VARIANT
