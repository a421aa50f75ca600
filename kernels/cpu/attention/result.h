// The result of a query: its output, or the partial result of one chunk of keys.
#pragma once

#include "plan.h"
#include "../vectors/convert.h"
#include "softmax.h"

namespace localllm::VARIANT {

// Sets the largest score of a query and its sum of weights before the first key. A sink is a score without a value;
// only the first chunk counts it.
static inline void begin_query(const AttentionArgs& args, int64_t chunk, int64_t head, float* peak, float* total) {
  bool sinks = args.sinks && chunk == 0;
  *peak = sinks ? args.sinks[head] * LOG2E : LOWEST;
  *total = sinks ? 1.0f : 0.0f;
}

static inline void write_output(const AttentionArgs& args, const Row& row, int64_t token, int64_t head,
                                const float* sums, float total) {
  int64_t offset = ((row.token + token) * args.heads + head) * args.value_dim;
  narrow(args.type, sums, 1.0f / total, args.out, offset, args.value_dim);
}

// Writes the output of a query or its partial result. `sums` [value_dim] is in natural order; `partials` has the partial
// results of the row.
static inline void end_query(const AttentionArgs& args, const Row& row, int64_t chunk, int64_t token, int64_t head,
                             float peak, float total, const float* sums, float* partials) {
  if (row.chunks == 1) return write_output(args, row, token, head, sums, total);
  float* partial = partial_of(args, row, partials, chunk, token, head);
  partial[0] = peak;
  partial[1] = total;
  memcpy(partial + 2, sums, args.value_dim * sizeof(float));
}

// Combines the partial results of one query and writes its output. sums [value_dim] is working memory.
static inline void merge(const AttentionArgs& args, const Row& row, int64_t token, int64_t head, float* partials,
                         float* sums) {
  float peak = LOWEST, total = 0.0f;
  for (int64_t chunk = 0; chunk < row.chunks; chunk++) {
    float chunk_peak = partial_of(args, row, partials, chunk, token, head)[0];
    peak = chunk_peak > peak ? chunk_peak : peak;
  }
  for (int64_t i = 0; i < args.value_dim; i++) sums[i] = 0.0f;
  for (int64_t chunk = 0; chunk < row.chunks; chunk++) {
    const float* partial = partial_of(args, row, partials, chunk, token, head);
    float weight = exp2_of(partial[0] - peak);
    total += weight * partial[1];
    each_vector(0, args.value_dim, [=](int64_t i, auto n) {
      store(sums + i, fma(load(partial + 2 + i, n), set1(weight), load(sums + i, n)), n);
    });
  }
  write_output(args, row, token, head, sums, total);
}

// Loads the query of a head as `lanes` 4-byte lanes of E (vectors.h), padded with zeros.
template <class E>
static inline void load_query(const AttentionArgs& args, const Row& row, int64_t token, int64_t head, int64_t lanes,
                              float* query) {
  int64_t offset = (row.token + token) * args.query_stride + head * args.dim;
  memset(query, 0, lanes * sizeof(float));
  if constexpr (sizeof(E) == 2) {  // the query already has type E
    memcpy(query, (const E*)args.query + offset, args.dim * sizeof(E));
  } else {
    widen(args.type, args.query, offset, query, args.dim);
  }
}

}  // namespace localllm::VARIANT
