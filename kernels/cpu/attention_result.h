// What becomes of a query's sum of values: its answer, or a part of it that waits for the others.
#pragma once

#include "attention_plan.h"
#include "convert.h"
#include "softmax.h"

namespace localllm::LANE {

// A query's largest score, and the sum of its weights relative to that, before it has met a key. A sink is a score
// without a value; it is met in the first piece.
static inline void begin_query(const AttentionArgs& args, int64_t piece, int64_t head, float* most, float* total) {
  bool sinks = args.sinks && piece == 0;
  *most = sinks ? args.sinks[head] * LOG2E : LOWEST;
  *total = sinks ? 1.0f : 0.0f;
}

static inline void answer(const AttentionArgs& args, const Row& row, int64_t token, int64_t head, const float* sums,
                          float total) {
  int64_t at = ((row.token + token) * args.heads + head) * args.dim;
  narrow(args.type, sums, 1.0f / total, args.out, at, args.dim);
}

// sums [dim] in their natural order; partials: the row's own.
static inline void end_query(const AttentionArgs& args, const Row& row, int64_t piece, int64_t token, int64_t head,
                             float most, float total, const float* sums, float* partials) {
  if (row.pieces == 1) return answer(args, row, token, head, sums, total);
  float* part = partial_at(args, row, partials, piece, token, head);
  part[0] = most;
  part[1] = total;
  memcpy(part + 2, sums, args.dim * sizeof(float));
}

// The pieces of one query put together; sums [dim] is working memory.
static inline void merge(const AttentionArgs& args, const Row& row, int64_t token, int64_t head, float* partials,
                         float* sums) {
  float most = LOWEST, total = 0.0f;
  for (int64_t piece = 0; piece < row.pieces; piece++) {
    float own = partial_at(args, row, partials, piece, token, head)[0];
    most = own > most ? own : most;
  }
  for (int64_t i = 0; i < args.dim; i++) sums[i] = 0.0f;
  for (int64_t piece = 0; piece < row.pieces; piece++) {
    const float* part = partial_at(args, row, partials, piece, token, head);
    float weight = exp2_of(part[0] - most);
    total += weight * part[1];
    each_vector(0, args.dim, [=](int64_t i, auto n) {
      store(sums + i, fma(load(part + 2 + i, n), set1(weight), load(sums + i, n)), n);
    });
  }
  answer(args, row, token, head, sums, total);
}

// A head's query as `lanes` lanes of E, zeros after the last dimension.
template <class E>
static inline void load_query(const AttentionArgs& args, const Row& row, int64_t token, int64_t head, int64_t lanes,
                              float* query) {
  int64_t at = (row.token + token) * args.query_stride + head * args.dim;
  memset(query, 0, lanes * sizeof(float));
  if constexpr (sizeof(E) == 2) {  // as it is
    memcpy(query, (const E*)args.query + at, args.dim * sizeof(E));
  } else {
    widen(args.type, args.query, at, query, args.dim);
  }
}

}  // namespace localllm::LANE
