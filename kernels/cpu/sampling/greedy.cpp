// Greedy sampling, logprobs, and masks of allowed tokens.
#include "logits.h"

namespace localllm::VARIANT {
namespace {

// The maximum and the sum of exponentials of one block of logits.
struct BlockStats {
  float largest;
  float sum;  // sum of exp(logit - largest)
};

BlockStats block_stats(const float* logits, int64_t begin, int64_t end) {
  float peak = block_max(logits, begin, end);
  if (peak == -INFINITY) return {peak, 0};
  F32 sums = zero(), top = set1(peak);
  int64_t i = begin;
  for (; i + WIDTH <= end; i += WIDTH) sums = sums + exp(load(logits + i) - top);
  float out = sum(sums);
  for (; i < end; i++) out += expf(logits[i] - peak);
  return {peak, out};
}

void write_logprob(const LogprobArgs& args, int64_t row, const BlockStats* stats) {
  int64_t blocks = blocks_in(args.vocab);
  float peak = -INFINITY;
  for (int64_t block = 0; block < blocks; block++)
    peak = larger(stats[block].largest, peak) ? stats[block].largest : peak;
  double total = 0;
  for (int64_t block = 0; block < blocks; block++) {
    if (stats[block].sum != 0) total += stats[block].sum * ::exp((double)stats[block].largest - peak);
  }
  args.normaliser[row] = (float)(peak + ::log(total));
  // The caller computes the logprobs of other tokens by the same formula, so a token always gets the same logprob.
  args.out[row] = args.logits[row * args.stride + args.tokens[row]] - args.normaliser[row];
}

}  // namespace

size_t greedy_shared(const GreedyArgs& args, int workers) {
  return workers_share_rows(args.rows, workers) ? (size_t)args.rows * workers * sizeof(Candidate) : 0;
}

void greedy(const GreedyArgs& args, const Worker& worker) {
  RowWorkers workers = row_workers(args.rows, worker);
  Share rows = rows_of(args.rows, workers);
  Candidate* candidates = (Candidate*)args.shared;
  for (long row = rows.begin; row < rows.end; row++) {
    Candidate best = largest_logit(args.logits + row * args.stride, args.vocab, workers);
    if (workers.count > 1) candidates[row * workers.count + workers.index] = best;
    else args.tokens[row] = best.token;
  }
  if (workers.count > 1) write_best_tokens(args.rows, candidates, args.tokens, worker);
}

void mask(const MaskArgs& args, const Worker& worker) {
  Share share = share_of(args.count * args.words_per_row, worker);
  for (long item = share.begin; item < share.end; item++) {
    uint32_t word = (uint32_t)args.words[item];
    if (word == ~0u) continue;
    int64_t index = item / args.words_per_row, begin = item % args.words_per_row * 32;
    float* logits = args.logits + args.rows[index] * args.stride + begin;
    int tokens = args.vocab - begin < 32 ? (int)(args.vocab - begin) : 32;
    for (int i = 0; i < tokens; i++) logits[i] = word >> i & 1 ? logits[i] : -INFINITY;
  }
}

size_t logprob_shared(const LogprobArgs& args, int workers) {
  return workers_share_rows(args.rows, workers) ? (size_t)args.rows * blocks_in(args.vocab) * sizeof(BlockStats) : 0;
}

void logprob(const LogprobArgs& args, const Worker& worker) {
  RowWorkers workers = row_workers(args.rows, worker);
  int64_t blocks = blocks_in(args.vocab);
  BlockStats* shared = (BlockStats*)(workers.count > 1 ? args.shared : worker.scratch(blocks * sizeof(BlockStats)));
  Share rows = rows_of(args.rows, workers), blocks_share = blocks_of(args.vocab, workers);
  for (long row = rows.begin; row < rows.end; row++) {
    BlockStats* stats = workers.count > 1 ? shared + row * blocks : shared;
    for (long block = blocks_share.begin; block < blocks_share.end; block++)
      stats[block] = block_stats(args.logits + row * args.stride, block * BLOCK, block_end(block, args.vocab));
    if (workers.count == 1) write_logprob(args, row, stats);
  }
  if (workers.count == 1) return;
  worker.barrier();
  Share share = share_of(args.rows, worker);
  for (long row = share.begin; row < share.end; row++) write_logprob(args, row, shared + row * blocks);
}

}  // namespace localllm::VARIANT
