// Up to CHUNK tokens of a head at once, with matrix products (kernels/ops/state.py: _chunk). All matrices of a chunk
// stay in the L2 cache. A product of decays is computed by multiplication: differences of their logarithms would lose
// digits.
#pragma once

#include "../vectors/transpose.h"
#include "product.h"
#include "token.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t CHUNK = 64;

static inline int64_t whole_vectors(int64_t count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

// The matrices of a chunk. Columns are padded to whole vectors, with zeros where a product reads them.
struct Workspace {
  int64_t keys, values;  // padded key_dim and value_dim
  Matrix state, query, key, columns, value, out, between, weights;
  float *share, *since_start;  // [CHUNK]
  float* row;                  // [values]

  static int64_t floats(const ScanArgs& args) {
    int64_t keys = whole_vectors(args.key_dim), values = whole_vectors(args.value_dim);
    return keys * values + CHUNK * (3 * keys + 2 * values + 2 * CHUNK + 2) + values;
  }

  static Workspace of(float* memory, const ScanArgs& args) {
    Workspace out;
    out.keys = whole_vectors(args.key_dim);
    out.values = whole_vectors(args.value_dim);
    auto matrix = [&memory](int64_t rows, int64_t stride) {
      float* data = memory;
      memory += rows * stride;
      return Matrix{data, stride};
    };
    out.state = matrix(out.keys, out.values);
    out.query = matrix(CHUNK, out.keys);
    out.key = matrix(CHUNK, out.keys);
    out.columns = matrix(out.keys, CHUNK);  // the keys, transposed
    out.value = matrix(CHUNK, out.values);
    out.out = matrix(CHUNK, out.values);
    out.between = matrix(CHUNK, CHUNK);  // [i, j]: decay from token j to token i; 0 for later j
    out.weights = matrix(CHUNK, CHUNK);
    out.share = memory;
    out.since_start = memory + CHUNK;
    out.row = memory + 2 * CHUNK;
    return out;
  }
};

static inline void scale_row(float* row, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += WIDTH) store(row + i, load(row + i) * set1(factor));
}

// Row `token` of `between`. A decay below 1e-30 becomes 0: products with denormal numbers are slow.
static inline void write_decays(Matrix between, int64_t token, float decay) {
  float* row = between.row(token);
  const float* before = between.row(token ? token - 1 : 0);
  int64_t used = token ? whole_vectors(token) : 0;
  for (int64_t i = 0; i < used; i += WIDTH)
    store(row + i, max(zero(), fma(load(before + i), set1(decay), set1(-1e-30f))));
  memset(row + used, 0, (CHUNK - used) * sizeof(float));
  row[token] = 1.0f;
}

static inline void transpose_keys(const Workspace& work, int64_t tokens) {
  for (int64_t token = 0; token < tokens; token += WIDTH)
    for (int64_t i = 0; i < work.keys; i += WIDTH) {
      F32 x[WIDTH];
      for (int r = 0; r < WIDTH; r++) x[r] = token + r < tokens ? load(work.key.row(token + r) + i) : zero();
      transpose(x);
      for (int r = 0; r < WIDTH; r++) store(work.columns.row(i + r) + token, x[r]);
    }
}

static inline void load_chunk(const ScanArgs& args, const Workspace& work, int64_t first, int64_t tokens,
                              int64_t head) {
  float start = 1.0f;
  for (int64_t token = 0; token < tokens; token++) {
    float *query = work.query.row(token), *key = work.key.row(token), *value = work.value.row(token);
    copy_floats(nullptr, query + work.keys - WIDTH, WIDTH);
    copy_floats(nullptr, key + work.keys - WIDTH, WIDTH);
    copy_floats(nullptr, value + work.values - WIDTH, WIDTH);
    load_token(args, first + token, head, query, key, value);
    Factors factors = factors_of(args, first + token, head);
    write_decays(work.between, token, factors.decay);
    start *= factors.decay;
    work.share[token] = factors.share;
    work.since_start[token] = start;
  }
  transpose_keys(work, tokens);
}

// weights[i, j] = factor[i] * (rows[i] · key[j]) * between[i, j] for j <= i; other entries of a tile are 0.
static inline void weigh(const Workspace& work, Matrix rows, const float* factor, int64_t tokens) {
  each_row_tile(0, tokens, [&]<int ROWS>(int64_t row) {
    int64_t used = whole_vectors(row + ROWS);
    product_rows<false, ROWS>(work.weights, rows, work.columns, row, work.keys, used);
    for (int64_t token = row; token < row + ROWS; token++)
      for (int64_t i = 0; i < used; i += WIDTH) {
        F32 decay = load(work.between.row(token) + i) * set1(factor ? -factor[token] : 1.0f);
        store(work.weights.row(token) + i, load(work.weights.row(token) + i) * decay);
      }
  });
}

// The deltas of the delta rule, in place of the values: forward substitution.
static inline void solve(const Workspace& work, int64_t tokens) {
  product<false>(work.out, work.key, work.state, tokens, work.keys, work.values);
  for (int64_t token = 0; token < tokens; token++) {
    float *value = work.value.row(token), *predicted = work.out.row(token);
    F32 decay = set1(-work.since_start[token]), share = set1(work.share[token]);
    for (int64_t i = 0; i < work.values; i += WIDTH)
      store(value + i, share * fma(decay, load(predicted + i), load(value + i)));
  }
  weigh(work, work.key, work.share, tokens);
  each_row_tile(0, tokens, [&]<int ROWS>(int64_t row) {
    product_rows<true, ROWS>(work.value, work.weights, work.value, row, row, work.values);
    for (int64_t token = row + 1; token < row + ROWS; token++)
      for (int64_t before = row; before < token; before++) {
        F32 weight = set1(work.weights.row(token)[before]);
        float* value = work.value.row(token);
        for (int64_t i = 0; i < work.values; i += WIDTH)
          store(value + i, fma(weight, load(work.value.row(before) + i), load(value + i)));
      }
  });
}

static inline void write_outputs(const ScanArgs& args, const Workspace& work, int64_t first, int64_t tokens,
                                 int64_t head) {
  product<false>(work.out, work.query, work.state, tokens, work.keys, work.values);
  for (int64_t token = 0; token < tokens; token++)
    scale_row(work.out.row(token), work.values, work.since_start[token]);
  weigh(work, work.query, nullptr, tokens);
  each_row_tile(0, tokens, [&]<int ROWS>(int64_t row) {
    product_rows<true, ROWS>(work.out, work.weights, work.value, row, row + ROWS, work.values);
  });
  for (int64_t token = 0; token < tokens; token++) {
    float* out = work.out.row(token);
    if (args.skip) {
      widen(args.type, args.x, (first + token) * args.stride + args.value + head * args.value_dim, work.row,
            args.value_dim);
      each_vector(0, args.value_dim, [&](int64_t i, auto n) {
        store(out + i, fma(load(work.row + i, n), set1(args.skip[head]), load(out + i, n)), n);
      });
    }
    narrow(args.type, out, 1.0f, args.out, ((first + token) * args.heads + head) * args.value_dim, args.value_dim);
  }
}

static inline void update_state(const Workspace& work, int64_t tokens) {
  const float* until_end = work.between.row(tokens - 1);
  for (int64_t i = 0; i < work.keys; i++) {
    float* row = work.columns.row(i);
    for (int64_t j = 0; j < tokens; j += WIDTH) store(row + j, load(row + j) * load(until_end + j));
    scale_row(work.state.row(i), work.values, work.since_start[tokens - 1]);
  }
  product<true>(work.state, work.columns, work.value, work.keys, tokens, work.values);
}

// Tokens [first, first + tokens) of a head.
static inline void scan_chunk(const ScanArgs& args, const Workspace& work, int64_t first, int64_t tokens,
                              int64_t head) {
  load_chunk(args, work, first, tokens, head);
  if (args.beta) solve(work, tokens);
  else
    for (int64_t token = 0; token < tokens; token++)
      scale_row(work.value.row(token), work.values, work.share[token]);
  write_outputs(args, work, first, tokens, head);
  update_state(work, tokens);
}

}  // namespace
}  // namespace localllm::VARIANT
