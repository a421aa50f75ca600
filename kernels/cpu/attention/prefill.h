// Attention of rows of many tokens: each block of queries is multiplied with one block of keys after another
// (FlashAttention-2; Dao, 2023). The keys and values of a block are rearranged once for all its queries, so that the
// products read dense panels.
//
//   queries  [rows][lanes]                row: (token, head of the group); lanes: see vectors.h
//   keys     [panel][lane][PANEL_LANES]   a panel has PANEL_LANES keys; a lane has one or two dimensions
//   scores   [rows][KEYS]                 later overwritten by the softmax weights, of type E
//   values   [panel][lane][PANEL_LANES]   a panel has PANEL_LANES dimensions; a lane has one or two keys
//   sums     [rows][value dim]            in block order (vectors.h)
#pragma once

#include "plan.h"
#include "result.h"
#include "vectors.h"
#include "softmax.h"

namespace localllm::VARIANT {

constexpr int64_t KEYS = 64;  // keys per block
constexpr int PANEL_LANES = BLOCK;

// Number of rows whose sums, two vectors each, fit in the registers.
#if defined(__AVX512F__)
constexpr int ROWS_AT_ONCE = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int ROWS_AT_ONCE = 6;
#else
constexpr int ROWS_AT_ONCE = 2;
#endif

// Without factors: sums [ROWS, PANEL_LANES] = left [ROWS, depth] × panel [depth, PANEL_LANES].
// With factors [ROWS]: sums = sums × factors (row by row) + left × panel.
template <class E, int ROWS>
static inline void multiply(const float* left, int64_t left_stride, const float* panel, int64_t depth,
                            const float* factors, float* sums, int64_t sums_stride) {
  F32 acc[ROWS][2];
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      acc[row][i] = factors ? load(sums + row * sums_stride + i * WIDTH) * set1(factors[row]) : zero();
    }
  }
  for (int64_t lane = 0; lane < depth; lane++) {
    F32 first = load(panel + lane * PANEL_LANES);
    F32 second = load(panel + lane * PANEL_LANES + WIDTH);
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++) {
      F32 factor = set1(left[row * left_stride + lane]);
      acc[row][0] = dot<E>(acc[row][0], factor, first);
      acc[row][1] = dot<E>(acc[row][1], factor, second);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) store(sums + row * sums_stride + i * WIDTH, acc[row][i]);
  }
}

// Calls body<ROWS>(row) for the rows [begin, end), with ROWS_AT_ONCE rows per call, then with fewer for the rest.
template <int ROWS = ROWS_AT_ONCE, class Body>
static inline void each_rows(int64_t begin, int64_t end, Body body) {
  for (; begin + ROWS <= end; begin += ROWS) body.template operator()<ROWS>(begin);
  if constexpr (ROWS > 1) each_rows<(ROWS > 8 ? 8 : ROWS > 4 ? 4 : ROWS / 2)>(begin, end, body);
}

// Rearranges `count` keys of one head into panels, padded with zeros after the last key and the last dimension.
template <class E, class C>
static inline void arrange_keys(const C* const* keys, int64_t count, int64_t dim, int64_t lanes, float* panels) {
  for (int64_t key = 0; key < round_up(count, PANEL_LANES); key += WIDTH) {
    float* panel = panels + key / PANEL_LANES * PANEL_LANES * lanes + key % PANEL_LANES;
    for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
      F32 x[WIDTH];
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; i++) {
        int64_t left = dim - lane * STEP<E>;
        x[i] = key + i < count && left > 0 ? load_lanes<E>(keys[key + i] + lane * STEP<E>, left) : zero();
      }
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; i++) store(panel + (lane + i) * PANEL_LANES, x[i]);
    }
  }
}

// Rearranges `count` values of one head into panels, padded with zeros to a multiple of PANEL_LANES keys.
template <class E, class C>
static inline void arrange_values(const C* const* values, int64_t count, int64_t dim, float* panels) {
  alignas(64) static const C zeros[BLOCK] = {};
  int64_t keys = round_up(count, PANEL_LANES);
  for (int64_t key = 0; key < keys; key += STEP<E>) {
    float* row = panels + key / STEP<E> * PANEL_LANES;
    each_block(dim, [&](int64_t first_dim, auto n) {
      const C* step_values[2];
      for (int i = 0; i < STEP<E>; i++) step_values[i] = key + i < count ? values[key + i] + first_dim : zeros;
      F32 x[2];
      load_values<E>(step_values, 0, n, x);
      store(row + first_dim * keys / STEP<E>, x[0]);
      store(row + first_dim * keys / STEP<E> + WIDTH, x[1]);
    });
  }
}

// Working memory for one block of queries, in floats.
struct Workspace {
  int64_t lanes, value_dim;  // value_dim: padded to whole blocks
  float *queries, *keys, *scores, *values, *sums, *totals, *peaks, *factors;

  template <class E>
  static int64_t floats(int64_t rows, const AttentionArgs& args) {
    int64_t lanes = round_up(args.dim, BLOCK) / STEP<E>, value_dim = round_up(args.value_dim, BLOCK);
    return rows * (lanes + KEYS + value_dim + WIDTH + 2) + KEYS * (lanes + value_dim / STEP<E>);
  }

  template <class E>
  static Workspace of(float* memory, int64_t rows, const AttentionArgs& args) {
    int64_t lanes = round_up(args.dim, BLOCK) / STEP<E>, value_dim = round_up(args.value_dim, BLOCK);
    Workspace out = {lanes, value_dim, memory, 0, 0, 0, 0, 0, 0, 0};
    out.keys = out.queries + rows * lanes;
    out.values = out.keys + KEYS * lanes;
    out.scores = out.values + KEYS * value_dim / STEP<E>;
    out.sums = out.scores + rows * KEYS;
    out.totals = out.sums + rows * value_dim;  // a vector of WIDTH partial sums per row
    out.peaks = out.totals + rows * WIDTH;
    out.factors = out.peaks + rows;
    return out;
  }
};

// Softmax of one row over one block of keys, in place: replaces the scores by weights of type E. The row attends to the
// keys [begin, end) of the block; `width` (a multiple of BLOCK) includes padding. `factor` receives the factor for the
// earlier sums.
template <class E>
static inline void softmax_row(const Scores& to_score, int64_t begin, int64_t end, int64_t width, float* scores,
                               float* peak, float* totals, float* factor) {
  for (int64_t i = 0; i < width; i += WIDTH) store(scores + i, to_score(load(scores + i)));
  for (int64_t i = 0; i < begin; i++) scores[i] = -INFINITY;
  for (int64_t i = end; i < width; i++) scores[i] = -INFINITY;
  F32 peaks = set1(*peak);
  for (int64_t i = 0; i < width; i += WIDTH) peaks = max(peaks, load(scores + i));
  float highest = largest(peaks);
  F32 factors = exp2(set1(*peak) - set1(highest));
  F32 sums = load(totals) * factors;
  for (int64_t i = 0; i < width; i += WIDTH) {
    F32 weight = exp2(load(scores + i) - set1(highest));
    sums = sums + weight;
    store((E*)scores + i, weight);
  }
  store(totals, sums);
  store(factor, factors, 1);
  *peak = highest;
}

// Computes one block of a row's tokens for one kv head, over one chunk of the keys.
template <class E, class C>
static inline void prefill(const AttentionArgs& args, const Row& row, int64_t chunk, int64_t block, int64_t kv_head,
                          float* partials, const Worker& worker) {
  int64_t group = args.heads / args.kv_heads, first_head = kv_head * group;
  int64_t first = block * row.block_tokens, tokens = min_of(row.block_tokens, row.tokens - first);
  int64_t rows = tokens * group, capacity = round_up(row.block_tokens * group, 16);
  float* memory = (float*)worker.scratch(Workspace::floats<E>(capacity, args) * sizeof(float));
  Workspace space = Workspace::of<E>(memory, capacity, args);
  for (int64_t i = 0; i < rows; i++) {
    load_query<E>(args, row, first + i / group, first_head + i % group, space.lanes, space.queries + i * space.lanes);
    float total;
    begin_query(args, chunk, first_head + i % group, space.peaks + i, &total);
    memset(space.totals + i * WIDTH, 0, WIDTH * sizeof(float));
    space.totals[i * WIDTH] = total;
  }
  memset(space.sums, 0, rows * space.value_dim * sizeof(float));

  Scores to_score = {args.scale, args.soft_cap};
  int64_t position = row.context - row.tokens + first;  // position of the block's first token
  int64_t reach = args.window > 0 ? args.window : row.context;
  Keys keys = keys_of(row, chunk);
  keys.begin = max_of(keys.begin, position + 1 - reach);
  keys.end = min_of(keys.end, position + tokens);
  for (int64_t key_begin = keys.begin; key_begin < keys.end; key_begin += KEYS) {
    int64_t count = min_of(KEYS, keys.end - key_begin), width = round_up(count, PANEL_LANES);
    int64_t offsets[KEYS];
    const C *key[KEYS], *value[KEYS];
    locate(args, row, key_begin, count, KEYS, offsets);
    for (int64_t i = 0; i < KEYS; i++) {
      key[i] = (const C*)args.key_pages + offsets[i] + kv_head * args.dim;
      value[i] = (const C*)args.value_pages + offsets[i] + kv_head * args.dim;
    }
    arrange_keys<E>(key, count, args.dim, space.lanes, space.keys);
    arrange_values<E>(value, count, args.value_dim, space.values);

    // The rows [first_row(a), end_row(b)) attend to at least one of the keys [a, b) of this block.
    auto first_row = [&](int64_t a) { return max_of(0, key_begin + a - position) * group; };
    auto end_row = [&](int64_t b) { return max_of(0, min_of(tokens, key_begin + b + reach - 1 - position)) * group; };
    for (int64_t panel = 0; panel < width; panel += PANEL_LANES) {
      each_rows(first_row(panel), end_row(min_of(count, panel + PANEL_LANES)), [&]<int ROWS>(int64_t i) {
        multiply<E, ROWS>(space.queries + i * space.lanes, space.lanes, space.keys + panel * space.lanes,
                          (args.dim + STEP<E> - 1) / STEP<E>, nullptr, space.scores + i * KEYS + panel, KEYS);
      });
    }
    for (int64_t i = first_row(0); i < end_row(count); i++) {
      // Number of keys from the first key of the block to the token's own position.
      int64_t visible = position + i / group + 1 - key_begin;
      softmax_row<E>(to_score, max_of(0, visible - reach), min_of(count, visible), width, space.scores + i * KEYS,
                     space.peaks + i, space.totals + i * WIDTH, space.factors + i);
    }
    for (int64_t panel = 0; panel < space.value_dim; panel += PANEL_LANES) {
      each_rows(first_row(0), end_row(count), [&]<int ROWS>(int64_t i) {
        int64_t begin = max_of(0, position + i / group + 1 - key_begin - reach) / STEP<E>;
        int64_t end = min_of(width, round_up(position + (i + ROWS - 1) / group + 1 - key_begin, STEP<E>)) / STEP<E>;
        multiply<E, ROWS>(space.scores + i * KEYS + begin, KEYS,
                          space.values + (panel * width / STEP<E> + begin * PANEL_LANES), end - begin,
                          space.factors + i, space.sums + i * space.value_dim + panel, space.value_dim);
      });
    }
  }
  for (int64_t i = 0; i < rows; i++) {
    natural_order<E, C>(space.sums + i * space.value_dim, space.value_dim / BLOCK);
    end_query(args, row, chunk, first + i / group, first_head + i % group, space.peaks[i],
              sum(load(space.totals + i * WIDTH)), space.sums + i * space.value_dim, partials);
  }
}

}  // namespace localllm::VARIANT
