// One token of a head: its inputs, and the update of the state by one token.
#pragma once

#include "rows.h"

namespace localllm::VARIANT {
namespace {

struct Factors {
  float decay;  // of the state
  float share;  // of the value: beta of the delta rule, or the step size of Mamba2
};

static inline float scalar(Type type, const void* p, int64_t i) {
  float value = 0;
  as_stored(type, p, [&](auto* row) { value = to_float(row[i]); });
  return value;
}

static inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

static inline Factors factors_of(const ScanArgs& args, int64_t token, int64_t head) {
  float step = softplus(scalar(args.type, args.step, token * args.step_stride + head) + args.dt_bias[head]);
  step = step < args.dt_min ? args.dt_min : step > args.dt_max ? args.dt_max : step;
  float decay = expf(-args.rates[head] * step);
  if (!args.beta) return {decay, step};
  return {decay, 1.0f / (1.0f + expf(-scalar(args.type, args.beta, token * args.beta_stride + head)))};
}

static inline float dot(const float* a, const float* b, int64_t count) {
  F32 total = zero();
  each_vector(0, count, [&](int64_t i, auto n) { total = fma(load(a + i, n), load(b + i, n), total); });
  return sum(total);
}

// x = scale * x / |x|
static inline void normalise(float* x, int64_t dim, float scale) {
  F32 factor = set1(scale / sqrtf(dot(x, x, dim) + 1e-6f));
  each_vector(0, dim, [&](int64_t i, auto n) { store(x + i, load(x + i, n) * factor, n); });
}

// The query and the key of a head [key_dim], and its value [value_dim].
static inline void load_token(const ScanArgs& args, int64_t token, int64_t head, float* query, float* key,
                              float* value) {
  int64_t start = token * args.stride, shared = head / (args.heads / args.key_heads) * args.key_dim;
  widen(args.type, args.x, start + args.query + shared, query, args.key_dim);
  widen(args.type, args.x, start + args.key + shared, key, args.key_dim);
  widen(args.type, args.x, start + args.value + head * args.value_dim, value, args.value_dim);
  if (!args.beta) return;
  normalise(query, args.key_dim, 1.0f / sqrtf((float)args.key_dim));
  normalise(key, args.key_dim, 1.0f);
}

// Adds keyᵀ state and queryᵀ state of KEYS rows of the state to `predicted` and `read`.
template <bool DELTA, int KEYS>
static inline void read_rows(const float* state, const float* key, const float* query, float* predicted, float* read,
                             int64_t dim) {
  F32 keys[KEYS], queries[KEYS];
  for (int r = 0; r < KEYS; r++) {
    keys[r] = set1(key[r]);
    queries[r] = set1(query[r]);
  }
  each_vector(0, dim, [&](int64_t i, auto n) {
    F32 a = load(predicted + i, n), b = load(read + i, n);
#pragma GCC unroll 8
    for (int r = 0; r < KEYS; r++) {
      F32 x = load(state + r * dim + i, n);
      if (DELTA) a = fma(keys[r], x, a);
      b = fma(queries[r], x, b);
    }
    if (DELTA) store(predicted + i, a, n);
    store(read + i, b, n);
  });
}

// state = decay * state + key ⊗ delta, for KEYS rows.
template <int KEYS>
static inline void write_rows(float* state, const float* key, const float* delta, float decay, int64_t dim) {
  F32 keys[KEYS], factor = set1(decay);
  for (int r = 0; r < KEYS; r++) keys[r] = set1(key[r]);
  each_vector(0, dim, [&](int64_t i, auto n) {
    F32 x = load(delta + i, n);
#pragma GCC unroll 8
    for (int r = 0; r < KEYS; r++) store(state + r * dim + i, fma(load(state + r * dim + i, n), factor, keys[r] * x), n);
  });
}

// Updates the state [key_dim, value_dim] by one token; value becomes the output. `work`: 2 * value_dim floats.
template <bool DELTA>
void update(const ScanArgs& args, float* state, const float* query, const float* key, float* value, Factors factors,
            float skip, float* work) {
  constexpr int KEYS = 8;
  int64_t dim = args.value_dim, i = 0;
  float *predicted = work, *read = work + dim;
  memset(work, 0, 2 * dim * sizeof(float));
  for (; i + KEYS <= args.key_dim; i += KEYS)
    read_rows<DELTA, KEYS>(state + i * dim, key + i, query + i, predicted, read, dim);
  for (; i < args.key_dim; i++) read_rows<DELTA, 1>(state + i * dim, key + i, query + i, predicted, read, dim);
  F32 decay = set1(factors.decay), share = set1(factors.share), match = set1(dot(query, key, args.key_dim));
  each_vector(0, dim, [&](int64_t j, auto n) {
    F32 x = load(value + j, n);
    F32 delta = share * (DELTA ? x - decay * load(predicted + j, n) : x);
    store(predicted + j, delta, n);
    store(value + j, fma(decay, load(read + j, n), fma(match, delta, set1(skip) * x)), n);
  });
  for (i = 0; i + KEYS <= args.key_dim; i += KEYS)
    write_rows<KEYS>(state + i * dim, key + i, predicted, factors.decay, dim);
  for (; i < args.key_dim; i++) write_rows<1>(state + i * dim, key + i, predicted, factors.decay, dim);
}

}  // namespace
}  // namespace localllm::VARIANT
