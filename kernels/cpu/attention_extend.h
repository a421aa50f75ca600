// Rows of many tokens: a block of queries meets a block of keys after the other. Keys and values of a block are
// rearranged once for all its queries, so that the products run over dense panels (Dao, 2023: the outer loop over
// queries, sums of values scaled late).
//
//   queries  [rows][lanes]                      rows are (token, head of the group)
//   keys     [panel][lane][PANEL_LANES]         a panel is PANEL_LANES keys, a lane one or two dimensions
//   scores   [rows][KEYS], then as weights      of E, in place
//   values   [panel][lane][PANEL_LANES]         a panel is PANEL_LANES dimensions, a lane one or two keys
//   sums     [rows][dim]                        in block order
#pragma once

#include "attention_plan.h"
#include "attention_result.h"
#include "lanes.h"
#include "softmax.h"

namespace localllm::LANE {

constexpr int64_t KEYS = 64;
constexpr int PANEL_LANES = BLOCK;

// Rows of sums that, with two vectors each, fill the registers.
#if defined(__AVX512F__)
constexpr int ROWS_AT_ONCE = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int ROWS_AT_ONCE = 6;
#else
constexpr int ROWS_AT_ONCE = 2;
#endif

// sums [ROWS, PANEL_LANES] = left [ROWS, depth] times panel [depth, PANEL_LANES]; with `shrink` they are first scaled
// by it, row by row, and then grow.
template <class E, int ROWS>
static inline void multiply(const float* left, int64_t left_stride, const float* panel, int64_t depth,
                            const float* shrink, float* sums, int64_t sums_stride) {
  F32 held[ROWS][2];
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      held[row][i] = shrink ? load(sums + row * sums_stride + i * WIDTH) * set1(shrink[row]) : zero();
    }
  }
  for (int64_t lane = 0; lane < depth; lane++) {
    F32 near = load(panel + lane * PANEL_LANES), far = load(panel + lane * PANEL_LANES + WIDTH);
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++) {
      F32 own = set1(left[row * left_stride + lane]);
      held[row][0] = dot<E>(held[row][0], own, near);
      held[row][1] = dot<E>(held[row][1], own, far);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) store(sums + row * sums_stride + i * WIDTH, held[row][i]);
  }
}

// body<ROWS>(row) for the rows [begin, end), as many at once as there are.
template <int ROWS = ROWS_AT_ONCE, class Body>
static inline void each_rows(int64_t begin, int64_t end, Body body) {
  for (; begin + ROWS <= end; begin += ROWS) body.template operator()<ROWS>(begin);
  if constexpr (ROWS > 1) each_rows<ROWS / 2>(begin, end, body);
}

// Keys [count] of one head -> panels of `lanes` lanes; zeros after the last key and dimension.
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

// Values likewise, up to a whole number of panels of keys: there the weights are zero.
template <class E, class C>
static inline void arrange_values(const C* const* values, int64_t count, int64_t dim, float* panels) {
  alignas(64) static const C nothing[BLOCK] = {};
  int64_t keys = round_up(count, PANEL_LANES);
  for (int64_t key = 0; key < keys; key += STEP<E>) {
    float* row = panels + key / STEP<E> * PANEL_LANES;
    each_block(dim, [&](int64_t at, auto n) {
      const C* own[2];
      for (int i = 0; i < STEP<E>; i++) own[i] = key + i < count ? values[key + i] + at : nothing;
      F32 x[2];
      load_values<E>(own, 0, n, x);
      store(row + at * keys / STEP<E>, x[0]);
      store(row + at * keys / STEP<E> + WIDTH, x[1]);
    });
  }
}

// The memory of one block, in floats.
struct Workspace {
  int64_t rows, lanes, dim;
  float *queries, *keys, *scores, *values, *sums, *totals, *most, *shrink;

  template <class E>
  static int64_t floats(int64_t rows, int64_t dim) {
    int64_t padded = round_up(dim, BLOCK), lanes = padded / STEP<E>;
    return rows * (lanes + KEYS + padded + WIDTH + 2) + 2 * KEYS * lanes;
  }

  template <class E>
  static Workspace of(float* memory, int64_t rows, int64_t dim) {
    int64_t padded = round_up(dim, BLOCK), lanes = padded / STEP<E>;
    Workspace out = {rows, lanes, padded, memory, 0, 0, 0, 0, 0, 0, 0};
    out.keys = out.queries + rows * lanes;
    out.values = out.keys + KEYS * lanes;
    out.scores = out.values + KEYS * lanes;
    out.sums = out.scores + rows * KEYS;
    out.totals = out.sums + rows * padded;  // a vector for each row
    out.most = out.totals + rows * WIDTH;
    out.shrink = out.most + rows;
    return out;
  }
};

// A row's scores of one block of keys become weights. It sees the keys [begin, end) of `width` (a multiple of BLOCK).
template <class E>
static inline void weigh_row(const Scores& to_score, int64_t begin, int64_t end, int64_t width, float* scores,
                             float* most, float* totals, float* shrink) {
  for (int64_t i = 0; i < width; i += WIDTH) store(scores + i, to_score(load(scores + i)));
  for (int64_t i = 0; i < begin; i++) scores[i] = -INFINITY;
  for (int64_t i = end; i < width; i++) scores[i] = -INFINITY;
  F32 peak = set1(*most);
  for (int64_t i = 0; i < width; i += WIDTH) peak = max(peak, load(scores + i));
  float highest = largest(peak);
  F32 shrinks = exp2(set1(*most) - set1(highest)), sums = load(totals) * shrinks;
  for (int64_t i = 0; i < width; i += WIDTH) {
    F32 weight = exp2(load(scores + i) - set1(highest));
    sums = sums + weight;
    store((E*)scores + i, weight);
  }
  store(totals, sums);
  store(shrink, shrinks, 1);
  *most = highest;
}

// One block of a row's tokens for one key-value head, over one piece of the keys.
template <class E, class C>
static inline void extend(const AttentionArgs& args, const Row& row, int64_t piece, int64_t block, int64_t kv_head,
                          float* partials, const Worker& worker) {
  int64_t group = args.heads / args.kv_heads, first_head = kv_head * group;
  int64_t first = block * row.block_tokens, tokens = min_of(row.block_tokens, row.tokens - first);
  int64_t rows = tokens * group, capacity = round_up(row.block_tokens * group, 16);
  Workspace own =
      Workspace::of<E>((float*)worker.scratch(Workspace::floats<E>(capacity, args.dim) * sizeof(float)), capacity,
                       args.dim);
  for (int64_t i = 0; i < rows; i++) {
    load_query<E>(args, row, first + i / group, first_head + i % group, own.lanes, own.queries + i * own.lanes);
    float total;
    begin_query(args, piece, first_head + i % group, own.most + i, &total);
    memset(own.totals + i * WIDTH, 0, WIDTH * sizeof(float));
    own.totals[i * WIDTH] = total;
  }
  memset(own.sums, 0, rows * own.dim * sizeof(float));

  Scores to_score = {args.scale, args.soft_cap};
  int64_t position = row.context - row.tokens + first;  // of the block's first token
  int64_t reach = args.window > 0 ? args.window : row.context;
  Keys keys = keys_of(row, piece);
  keys.begin = max_of(keys.begin, position + 1 - reach);
  keys.end = min_of(keys.end, position + tokens);
  for (int64_t at = keys.begin; at < keys.end; at += KEYS) {
    int64_t count = min_of(KEYS, keys.end - at), width = round_up(count, PANEL_LANES);
    int64_t offsets[KEYS];
    const C *key[KEYS], *value[KEYS];
    locate(args, row, at, count, KEYS, offsets);
    for (int64_t i = 0; i < KEYS; i++) {
      key[i] = (const C*)args.key_pages + offsets[i] + kv_head * args.dim;
      value[i] = (const C*)args.value_pages + offsets[i] + kv_head * args.dim;
    }
    arrange_keys<E>(key, count, args.dim, own.lanes, own.keys);
    arrange_values<E>(value, count, args.dim, own.values);

    // Rows [since(a), until(b)) see some of the keys [a, b) of this block.
    auto since = [&](int64_t a) { return max_of(0, at + a - position) * group; };
    auto until = [&](int64_t b) { return max_of(0, min_of(tokens, at + b + reach - 1 - position)) * group; };
    for (int64_t panel = 0; panel < width; panel += PANEL_LANES) {
      each_rows(since(panel), until(min_of(count, panel + PANEL_LANES)), [&]<int ROWS>(int64_t i) {
        multiply<E, ROWS>(own.queries + i * own.lanes, own.lanes, own.keys + panel * own.lanes,
                          (args.dim + STEP<E> - 1) / STEP<E>, nullptr, own.scores + i * KEYS + panel, KEYS);
      });
    }
    for (int64_t i = since(0); i < until(count); i++) {
      int64_t seen = position + i / group + 1 - at;  // keys up to itself
      weigh_row<E>(to_score, max_of(0, seen - reach), min_of(count, seen), width, own.scores + i * KEYS, own.most + i,
                   own.totals + i * WIDTH, own.shrink + i);
    }
    for (int64_t panel = 0; panel < own.dim; panel += PANEL_LANES) {
      each_rows(since(0), until(count), [&]<int ROWS>(int64_t i) {
        int64_t begin = max_of(0, position + i / group + 1 - at - reach) / STEP<E>;
        int64_t end = min_of(width, round_up(position + (i + ROWS - 1) / group + 1 - at, STEP<E>)) / STEP<E>;
        multiply<E, ROWS>(own.scores + i * KEYS + begin, KEYS,
                          own.values + (panel * width / STEP<E> + begin * PANEL_LANES), end - begin, own.shrink + i,
                          own.sums + i * own.dim + panel, own.dim);
      });
    }
  }
  for (int64_t i = 0; i < rows; i++) {
    natural_order<E, C>(own.sums + i * own.dim, own.dim / BLOCK);
    end_query(args, row, piece, first + i / group, first_head + i % group, own.most[i],
              sum(load(own.totals + i * WIDTH)), own.sums + i * own.dim, partials);
  }
}

}  // namespace localllm::LANE
