// Seeded sampling with Gumbel noise among the tokens that pass the filters top_k, top_p and min_p (defined in
// kernels/ops/sampling.py).
//
// Without filters, one pass over the logits suffices. With filters, a first pass computes the maximum of each block;
// later passes skip the blocks whose maximum is below the cutoff.
#include "gumbel.h"
#include "logits.h"
#include "threshold.h"

namespace localllm::VARIANT {
namespace {

constexpr float LOWEST = -3.402823466e38f;
constexpr unsigned ALL = (1u << WIDTH) - 1;  // bits of a full vector
constexpr int64_t NUCLEUS_BLOCKS = 64;  // first cutoff for top_p: the 64th largest block maximum; most nuclei are above

struct Row {
  const float* logits;
  int64_t vocab;
  float temperature;
  uint32_t key;
  int64_t top_k;  // 0: no filter
  float top_p;    // 1: no filter
  float min_p;    // 0: no filter
};

Row row_of(const DrawArgs& args, int64_t row) {
  int64_t top_k = args.top_k ? args.top_k[row] : 0;
  return {args.logits + row * args.stride,
          args.vocab,
          args.temperature[row],
          draw_key((uint32_t)args.seed_low[row], (uint32_t)args.seed_high[row], (uint32_t)args.position[row]),
          top_k < args.vocab ? top_k : 0,
          args.top_p ? args.top_p[row] : 1.0f,
          args.min_p ? args.min_p[row] : 0.0f};
}

// Working memory for one row, shared by the workers of the row.
struct RowMemory {
  float* block_max;   // [blocks] largest logit of each block
  float* block_sums;  // [blocks] sum of exp((logit - largest) / temperature), only for top_p
  float* values;      // [vocab] logit / temperature of candidates; each worker writes from its first block on
  float* weights;     // [vocab] weights of the values
  int64_t* counts;    // [workers] number of candidates of each worker
  struct Filter {
    float cutoff;     // tokens with a logit of at least this are candidates
    float min_value;  // result, valid if done: the smallest value (logit / temperature) that passes
    bool done;
  }* filter;
};

int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

size_t row_bytes(int64_t vocab, int workers) {
  return 2 * aligned(blocks_in(vocab) * 4) + 2 * aligned(vocab * 4) + aligned(workers * 8) +
         aligned(sizeof(RowMemory::Filter));
}

RowMemory row_memory(void* memory, int64_t vocab, int workers) {
  char* next = (char*)memory;
  auto allocate = [&](int64_t bytes) {
    char* start = next;
    next += aligned(bytes);
    return start;
  };
  RowMemory out;
  out.block_max = (float*)allocate(blocks_in(vocab) * 4);
  out.block_sums = (float*)allocate(blocks_in(vocab) * 4);
  out.values = (float*)allocate(vocab * 4);
  out.weights = (float*)allocate(vocab * 4);
  out.counts = (int64_t*)allocate(workers * 8);
  out.filter = (RowMemory::Filter*)allocate(sizeof(RowMemory::Filter));
  return out;
}

// Fills block_max and, if `needs_sums`, block_sums for the blocks of this worker.
void summarise_blocks(const Row& row, const RowWorkers& workers, const RowMemory& memory, bool needs_sums) {
  F32 temperature = set1(row.temperature);
  Share blocks = blocks_of(row.vocab, workers);
  for (long block = blocks.begin; block < blocks.end; block++) {
    int64_t i = block * BLOCK, end = block_end(block, row.vocab);
    float peak = block_max(row.logits, i, end);
    memory.block_max[block] = peak;
    if (!needs_sums) continue;
    F32 sums = zero(), top = set1(peak / row.temperature);
    for (; i + WIDTH <= end; i += WIDTH) sums = sums + exp(load(row.logits + i) / temperature - top);
    float rest = 0;
    for (; i < end; i++) rest += expf(row.logits[i] / row.temperature - peak / row.temperature);
    memory.block_sums[block] = peak == -INFINITY ? 0 : sum(sums) + rest;
  }
}

// The n-th largest block maximum. At least n logits are not below it.
float first_cutoff(const Row& row, const RowMemory& memory, int64_t n) {
  int64_t count = 0, blocks = blocks_in(row.vocab);
  for (int64_t block = 0; block < blocks; block++) {
    if (memory.block_max[block] == -INFINITY) continue;
    memory.values[count] = memory.block_max[block];
    memory.weights[count++] = 1;
  }
  return count < n ? LOWEST : threshold_of(memory.values, memory.weights, count, (double)n);
}

// Writes the values and the number of this worker's candidates.
void collect_candidates(const Row& row, const RowWorkers& workers, const RowMemory& memory) {
  float cutoff = memory.filter->cutoff;
  F32 cutoffs = set1(cutoff), temperature = set1(row.temperature);
  Share blocks = blocks_of(row.vocab, workers);
  float* values = memory.values + blocks.begin * BLOCK;
  int64_t count = 0;
  for (long block = blocks.begin; block < blocks.end; block++) {
    if (memory.block_max[block] < cutoff) continue;
    each_vector(block * BLOCK, block_end(block, row.vocab), [&](int64_t i, auto n) {
      F32 logits = load(row.logits + i, n);
      unsigned bits = first_bits(not_below(logits, cutoffs), n);
      if (bits == ALL) {
        store(values + count, logits / temperature);
        count += WIDTH;
        return;
      }
      for (; bits; bits &= bits - 1) values[count++] = row.logits[i + __builtin_ctz(bits)] / row.temperature;
    });
  }
  memory.counts[workers.index] = count;
}

// Moves the candidates of all workers to the start of `values`. Returns their number.
int64_t join_candidates(const Row& row, const RowWorkers& workers, const RowMemory& memory) {
  int64_t count = 0;
  for (int worker = 0; worker < workers.count; worker++) {
    Share blocks = blocks_of(row.vocab, {workers.worker, worker, workers.count});
    memmove(memory.values + count, memory.values + blocks.begin * BLOCK, memory.counts[worker] * 4);
    count += memory.counts[worker];
  }
  return count;
}

// Computes weights = exp(values - top) and returns their sum.
double exp_weights(float* weights, const float* values, int64_t count, float top) {
  double total = 0;
  for (int64_t i = 0; i < count;) {
    int64_t end = i + BLOCK < count ? i + BLOCK : count;
    F32 sums = zero();
    for (; i + WIDTH <= end; i += WIDTH) {
      F32 weight = exp(load(values + i) - set1(top));
      store(weights + i, weight);
      sums = sums + weight;
    }
    total += sum(sums);
    for (; i < end; i++) total += weights[i] = expf(values[i] - top);
  }
  return total;
}

// Computes filter->min_value from all candidates. If the candidates do not reach the nucleus's weight, it lowers the
// cutoff instead and leaves `done` false. One worker calls it.
void apply_filters(const Row& row, const RowWorkers& workers, const RowMemory& memory, float top, double total) {
  RowMemory::Filter& filter = *memory.filter;
  int64_t count = join_candidates(row, workers, memory);
  filter.done = true;
  if (row.top_k) {
    for (int64_t i = 0; i < count; i++) memory.weights[i] = 1;
    filter.min_value = threshold_of(memory.values, memory.weights, count, (double)row.top_k);
    if (!(row.top_p < 1)) return;
    int64_t passing = 0;
    for (int64_t i = 0; i < count; i++) {
      if (memory.values[i] >= filter.min_value) memory.values[passing++] = memory.values[i];
    }
    count = passing;
    total = exp_weights(memory.weights, memory.values, count, top);
  } else if (exp_weights(memory.weights, memory.values, count, top) < row.top_p * total && filter.cutoff > LOWEST) {
    // All tokens below this logit together weigh less than the tokens that top_p may remove.
    float sufficient = (top - (float)::log((double)row.vocab / ((1.0 - row.top_p) * total))) * row.temperature;
    filter.cutoff = sufficient < filter.cutoff ? sufficient : LOWEST;
    filter.done = false;
    return;
  }
  filter.min_value = threshold_of(memory.values, memory.weights, count, row.top_p * total);
}

float row_max(const Row& row, const RowMemory& memory) {
  float peak = -INFINITY;
  for (int64_t block = 0; block < blocks_in(row.vocab); block++)
    peak = larger(memory.block_max[block], peak) ? memory.block_max[block] : peak;
  return peak;
}

// The sum of exp(logit / temperature - top) over the row.
double total_weight(const Row& row, const RowMemory& memory, float top) {
  double total = 0;
  for (int64_t block = 0; block < blocks_in(row.vocab); block++) {
    float sum = memory.block_sums[block];
    if (sum > 0) total += sum * ::exp((double)(memory.block_max[block] / row.temperature) - top);
  }
  return total;
}

// The smallest value (logit / temperature) that passes the filters. After the call, block_max is valid. -infinity if
// all tokens pass: there are no filters, or the row has a NaN or an infinity, which wins in spite of filters.
float min_passing_value(const Row& row, const RowWorkers& workers, const RowMemory& memory) {
  bool nucleus = row.top_p < 1;
  bool needs_sums = nucleus && !row.top_k;
  if (!row.top_k && !nucleus && !(row.min_p > 0)) return -INFINITY;
  barrier(workers);  // all workers have finished the previous row, which used the same memory
  summarise_blocks(row, workers, memory, needs_sums);
  barrier(workers);
  float top = row_max(row, memory) / row.temperature;
  if (!(top < INFINITY && top > -INFINITY)) return -INFINITY;
  float min_value = row.min_p > 0 ? top + logf(row.min_p) : LOWEST;
  if (!row.top_k && !nucleus) return min_value;
  double total = needs_sums ? total_weight(row, memory, top) : 0;
  if (workers.index == 0)
    *memory.filter = {first_cutoff(row, memory, row.top_k ? row.top_k : NUCLEUS_BLOCKS), 0, false};
  barrier(workers);
  do {
    collect_candidates(row, workers, memory);
    barrier(workers);
    if (workers.index == 0) apply_filters(row, workers, memory, top, total);
    barrier(workers);
  } while (!memory.filter->done);
  return min_value > memory.filter->min_value ? min_value : memory.filter->min_value;
}

// The token with the largest value + noise among this worker's tokens whose value is at least `min_value`. If
// `block_max` is given, it skips the blocks whose logits are all too small.
Candidate best_noisy(const Row& row, const RowWorkers& workers, float min_value, const float* block_max) {
  float cutoff = min_value * row.temperature;
  // A margin for rounding: if a logit is below the cutoff, logit / temperature is below `min_value`.
  cutoff -= fabsf(cutoff) * 1e-6f;
  F32 temperature = set1(row.temperature), lowest = set1(min_value), smallest_logit = set1(cutoff);
  Candidate best = {LOWEST, 0};
  Share blocks = blocks_of(row.vocab, workers);
  for (long block = blocks.begin; block < blocks.end; block++) {
    if (block_max && block_max[block] < cutoff) continue;
    each_vector(block * BLOCK, block_end(block, row.vocab), [&](int64_t i, auto n) {
      F32 logits = load(row.logits + i, n);
      if (!not_below(logits, smallest_logit)) return;
      F32 x = logits / temperature;
      Words noise = uniform_bits(row.key, (uint32_t)i);
      unsigned bits = not_below(x + gumbel_bound(noise), set1(best.value)) & not_below(x, lowest);
      bits = first_bits(bits, n);
      if (!bits) return;
      float values[WIDTH];
      store(values, x + gumbel(noise));
      for (; bits; bits &= bits - 1) update_best(best, values[__builtin_ctz(bits)], i + __builtin_ctz(bits));
    });
  }
  return best;
}

Candidate best_of_worker(const Row& row, const RowWorkers& workers, const RowMemory& memory) {
  if (row.temperature == 0) return largest_logit(row.logits, row.vocab, workers);
  float min_value = min_passing_value(row, workers, memory);
  return best_noisy(row, workers, min_value, min_value > -INFINITY ? memory.block_max : nullptr);
}

}  // namespace

size_t draw_shared(const DrawArgs& args, int workers) {
  if (!workers_share_rows(args.rows, workers)) return 0;
  return row_bytes(args.vocab, workers) + (size_t)args.rows * workers * sizeof(Candidate);
}

void draw(const DrawArgs& args, const Worker& worker) {
  RowWorkers workers = row_workers(args.rows, worker);
  size_t bytes = row_bytes(args.vocab, workers.count);
  char* start = (char*)(workers.count > 1 ? args.shared : worker.scratch(bytes));
  RowMemory memory = row_memory(start, args.vocab, workers.count);
  Candidate* candidates = (Candidate*)(start + bytes);  // [rows, workers]
  Share rows = rows_of(args.rows, workers);
  for (long row = rows.begin; row < rows.end; row++) {
    Candidate best = best_of_worker(row_of(args, row), workers, memory);
    if (workers.count > 1) candidates[row * workers.count + workers.index] = best;
    else args.tokens[row] = best.token;
  }
  if (workers.count > 1) write_best_tokens(args.rows, candidates, args.tokens, worker);
}

}  // namespace localllm::VARIANT
