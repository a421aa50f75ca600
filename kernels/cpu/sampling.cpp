// The likeliest token, its probability, and tokens that are not allowed.
#include "crew.h"

namespace localllm::LANE {
namespace {

// What one pass leaves of a block.
struct Part {
  float largest;
  float sum;  // of exp(x - largest)
};

Part part_of(const float* logits, int64_t begin, int64_t end) {
  float most = block_largest(logits, begin, end);
  if (most == -INFINITY) return {most, 0};
  F32 sums = zero(), top = set1(most);
  int64_t i = begin;
  for (; i + WIDTH <= end; i += WIDTH) sums = sums + exp(load(logits + i) - top);
  float out = sum(sums);
  for (; i < end; i++) out += expf(logits[i] - most);
  return {most, out};
}

void sum_up(const LogprobArgs& args, int64_t row, const Part* parts) {
  int64_t blocks = blocks_in(args.vocab);
  float most = -INFINITY;
  for (int64_t block = 0; block < blocks; block++)
    most = larger(parts[block].largest, most) ? parts[block].largest : most;
  double total = 0;
  for (int64_t block = 0; block < blocks; block++) {
    if (parts[block].sum != 0) total += parts[block].sum * ::exp((double)parts[block].largest - most);
  }
  args.normaliser[row] = (float)(most + ::log(total));
  // As the caller does it for more tokens, so that one token has one number.
  args.out[row] = args.logits[row * args.stride + args.tokens[row]] - args.normaliser[row];
}

}  // namespace

size_t greedy_shared(const GreedyArgs& args, int workers) {
  return together(args.rows, workers) ? (size_t)args.rows * workers * sizeof(Best) : 0;
}

void greedy(const GreedyArgs& args, const Worker& worker) {
  Crew crew = crew_of(args.rows, worker);
  Share rows = rows_of(args.rows, crew);
  Best* found = (Best*)args.shared;
  for (long row = rows.begin; row < rows.end; row++) {
    Best best = largest_of(args.logits + row * args.stride, args.vocab, crew);
    if (crew.count > 1) found[row * crew.count + crew.index] = best;
    else args.tokens[row] = best.token;
  }
  if (crew.count == 1) return;
  worker.barrier();
  Share own = share_of(args.rows, worker);
  for (long row = own.begin; row < own.end; row++) args.tokens[row] = best_token(found + row * crew.count, crew.count);
}

void mask(const MaskArgs& args, const Worker& worker) {
  Share share = share_of(args.count * args.words_per_row, worker);
  for (long item = share.begin; item < share.end; item++) {
    uint32_t word = (uint32_t)args.words[item];
    if (word == ~0u) continue;
    int64_t at = item / args.words_per_row, begin = item % args.words_per_row * 32;
    float* logits = args.logits + args.rows[at] * args.stride + begin;
    int tokens = args.vocab - begin < 32 ? (int)(args.vocab - begin) : 32;
    for (int i = 0; i < tokens; i++) logits[i] = word >> i & 1 ? logits[i] : -INFINITY;
  }
}

size_t logprob_shared(const LogprobArgs& args, int workers) {
  return together(args.rows, workers) ? (size_t)args.rows * blocks_in(args.vocab) * sizeof(Part) : 0;
}

void logprob(const LogprobArgs& args, const Worker& worker) {
  Crew crew = crew_of(args.rows, worker);
  int64_t blocks = blocks_in(args.vocab);
  Part* shared = (Part*)(crew.count > 1 ? args.shared : worker.scratch(blocks * sizeof(Part)));
  Share rows = rows_of(args.rows, crew), own_blocks = blocks_of(args.vocab, crew);
  for (long row = rows.begin; row < rows.end; row++) {
    Part* parts = crew.count > 1 ? shared + row * blocks : shared;
    for (long block = own_blocks.begin; block < own_blocks.end; block++)
      parts[block] = part_of(args.logits + row * args.stride, block * BLOCK, block_end(block, args.vocab));
    if (crew.count == 1) sum_up(args, row, parts);
  }
  if (crew.count == 1) return;
  worker.barrier();
  Share own = share_of(args.rows, worker);
  for (long row = own.begin; row < own.end; row++) sum_up(args, row, shared + row * blocks);
}

}  // namespace localllm::LANE
