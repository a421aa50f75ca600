// Division of logits among workers. With at least as many rows as workers, each worker computes its own rows. With
// fewer rows, all workers compute every row together, each its share of the blocks of the row. Both ways give the same
// result, because the blocks are the same and are combined in order.
#pragma once

#include "../vectors/row.h"

namespace localllm::VARIANT {

constexpr int64_t BLOCK = 128;  // logits per block

static inline int64_t blocks_in(int64_t vocab) { return (vocab + BLOCK - 1) / BLOCK; }
static inline int64_t block_end(int64_t block, int64_t vocab) {
  return (block + 1) * BLOCK < vocab ? (block + 1) * BLOCK : vocab;
}

// The workers that compute one row together: this worker alone, or the whole team.
struct RowWorkers {
  const Worker* worker;
  int index, count;
};

static inline bool workers_share_rows(int64_t rows, int workers) { return workers > 1 && rows < workers; }

static inline RowWorkers row_workers(int64_t rows, const Worker& worker) {
  if (workers_share_rows(rows, worker.count)) return {&worker, worker.index, worker.count};
  return {&worker, 0, 1};
}

static inline void barrier(const RowWorkers& workers) {
  if (workers.count > 1) workers.worker->barrier();
}

// The rows that this worker computes, alone or with the team.
static inline Share rows_of(int64_t rows, const RowWorkers& workers) {
  return workers.count > 1 ? Share{0, (long)rows} : share_of(rows, *workers.worker);
}

// The blocks of a row that this worker computes.
static inline Share blocks_of(int64_t vocab, const RowWorkers& workers) {
  return share_of(blocks_in(vocab), Worker{workers.index, workers.count, nullptr});
}

// A token and its value. As in torch, NaN is larger than any number.
struct Candidate {
  float value;
  int64_t token;
};

static inline bool larger(float a, float b) { return a != a ? b == b : a > b; }

// Replaces `best` if the value is larger. Call it in ascending order of tokens: of tokens with equal values, the first
// one wins.
static inline void update_best(Candidate& best, float value, int64_t token) {
  if (larger(value, best.value)) best = {value, token};
}

// The best token of a row, from the candidate of each worker. Workers have ascending blocks of tokens.
static inline int64_t best_token(const Candidate* candidates, int workers) {
  Candidate best = candidates[0];
  for (int worker = 1; worker < workers; worker++)
    update_best(best, candidates[worker].value, candidates[worker].token);
  return best.token;
}

// Writes the best token of each row, from the candidates [rows, workers]. The last step when workers share rows.
static inline void write_best_tokens(int64_t rows, const Candidate* candidates, int64_t* tokens, const Worker& worker) {
  worker.barrier();
  Share share = share_of(rows, worker);
  for (long row = share.begin; row < share.end; row++)
    tokens[row] = best_token(candidates + row * worker.count, worker.count);
}

// Bit i is 1 unless a[i] < b[i]; it is also 1 if one of them is NaN.
static inline unsigned not_below(F32 a, F32 b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ);
#elif defined(__AVX2__)
  return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_NLT_UQ));
#else
  unsigned bits = 0;
  for (int i = 0; i < WIDTH; i++) bits |= (unsigned)!(a.v[i] < b.v[i]) << i;
  return bits;
#endif
}

// Bit i is 1 if x[i] is NaN.
static inline unsigned not_numbers(F32 x) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
#elif defined(__AVX2__)
  return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
#else
  unsigned bits = 0;
  for (int i = 0; i < WIDTH; i++) bits |= (unsigned)(x.v[i] != x.v[i]) << i;
  return bits;
#endif
}

// The bits of the first n vector elements.
static inline unsigned first_bits(unsigned bits, Full) { return bits; }
static inline unsigned first_bits(unsigned bits, int n) { return bits & ((1u << n) - 1); }

// The largest of logits [begin, end); NaN if one of them is NaN.
static inline float block_max(const float* logits, int64_t begin, int64_t end) {
  F32 maxima = set1(-INFINITY);
  unsigned nan = 0;  // separate, because max() ignores NaN
  int64_t i = begin;
  for (; i + WIDTH <= end; i += WIDTH) {
    F32 x = load(logits + i);
    nan |= not_numbers(x);
    maxima = max(x, maxima);
  }
  float out = nan ? NAN : largest(maxima);
  for (; i < end; i++) out = larger(logits[i], out) ? logits[i] : out;
  return out;
}

// The best token among this worker's blocks of a row.
static inline Candidate largest_logit(const float* logits, int64_t vocab, const RowWorkers& workers) {
  Candidate best = {-INFINITY, 0};
  Share blocks = blocks_of(vocab, workers);
  for (long block = blocks.begin; block < blocks.end; block++) {
    int64_t token = block * BLOCK;
    float peak = block_max(logits, token, block_end(block, vocab));
    if (!larger(peak, best.value)) continue;
    // Finds the first logit that equals the peak; if the peak is NaN, the first NaN.
    while (peak == peak ? logits[token] != peak : logits[token] == logits[token]) token++;
    best = {peak, token};
  }
  return best;
}

}  // namespace localllm::VARIANT
