// A row of logits and who works on it: each worker alone where there are rows enough, else all of them together, every one on
// its share of the row's blocks. Answers do not depend on which: blocks are always the same, and added up in order.
#pragma once

#include "row.h"

namespace localllm::LANE {

constexpr int64_t BLOCK = 128;  // logits

static inline int64_t blocks_in(int64_t vocab) { return (vocab + BLOCK - 1) / BLOCK; }
static inline int64_t block_end(int64_t block, int64_t vocab) {
  return (block + 1) * BLOCK < vocab ? (block + 1) * BLOCK : vocab;
}

struct Crew {
  const Worker* worker;
  int index, count;
};

static inline bool together(int64_t rows, int workers) { return workers > 1 && rows < workers; }

static inline Crew crew_of(int64_t rows, const Worker& worker) {
  if (together(rows, worker.count)) return {&worker, worker.index, worker.count};
  return {&worker, 0, 1};
}

static inline void sync(const Crew& crew) {
  if (crew.count > 1) crew.worker->barrier();
}

// The rows that the crew works on: those of the one worker, or all.
static inline Share rows_of(int64_t rows, const Crew& crew) {
  return crew.count > 1 ? Share{0, (long)rows} : share_of(rows, *crew.worker);
}

// The blocks of a row that fall to this member.
static inline Share blocks_of(int64_t vocab, const Crew& crew) {
  return share_of(blocks_in(vocab), Worker{crew.index, crew.count, nullptr});
}

// A token and its value. NaN is larger than any number, as torch has it.
struct Best {
  float value;
  int64_t token;
};

static inline bool larger(float a, float b) { return a != a ? b == b : a > b; }

// To be called in the order of tokens: the first of equals stays.
static inline void offer(Best& best, float value, int64_t token) {
  if (larger(value, best.value)) best = {value, token};
}

// The best of what each member found for a row, in their order, which is that of the tokens.
static inline int64_t best_token(const Best* found, int members) {
  Best best = found[0];
  for (int member = 1; member < members; member++) offer(best, found[member].value, found[member].token);
  return best.token;
}

// Bit i: a[i] is not below b[i], which is so too where one of them is NaN.
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

// Bit i: x[i] is NaN.
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

// The bits of the lanes that there are.
static inline unsigned first_bits(unsigned bits, Full) { return bits; }
static inline unsigned first_bits(unsigned bits, int n) { return bits & ((1u << n) - 1); }

// The largest of logits [begin, end), NaN if there is one.
static inline float block_largest(const float* logits, int64_t begin, int64_t end) {
  F32 most = set1(-INFINITY);
  unsigned nan = 0;  // max() passes over them
  int64_t i = begin;
  for (; i + WIDTH <= end; i += WIDTH) {
    F32 x = load(logits + i);
    nan |= not_numbers(x);
    most = max(x, most);
  }
  float out = nan ? NAN : largest(most);
  for (; i < end; i++) out = larger(logits[i], out) ? logits[i] : out;
  return out;
}

// This member's best token of a row.
static inline Best largest_of(const float* logits, int64_t vocab, const Crew& crew) {
  Best best = {-INFINITY, 0};
  Share blocks = blocks_of(vocab, crew);
  for (long block = blocks.begin; block < blocks.end; block++) {
    int64_t at = block * BLOCK, end = block_end(block, vocab);
    float most = block_largest(logits, at, end);
    if (!larger(most, best.value)) continue;
    while (most == most ? logits[at] != most : logits[at] == logits[at]) at++;
    best = {most, at};
  }
  return best;
}

}  // namespace localllm::LANE
