// Rows of one token: every key and value is read once, where it lies, for all queries that share it. What such a row
// costs is the reading, so the next tile is asked for while this one is computed with.
#pragma once

#include "attention_plan.h"
#include "attention_result.h"
#include "lanes.h"
#include "softmax.h"

namespace localllm::LANE {

constexpr int TILE_KEYS = 32;

// The next tile, asked for a little at a time and in the order in which it lies, whatever the order of its use, is what
// memory answers fastest: by two fifths where measured. The loops below work on a copy, which stays in registers; they
// are functions of their own for the same reason.
struct Ahead {
  const char* pages;
  const int64_t* offsets;  // [left], in bytes
  int64_t left, width;     // keys, and the bytes of each
  int64_t at = 0;
  int owed = 0;

  template <int BYTES>
  void ask() {
    if constexpr (BYTES % 64 == 0) {
      for (int line = 0; line < BYTES / 64; line++) ask_line();
    } else {
      for (owed += BYTES; owed >= 64; owed -= 64) ask_line();
    }
  }

  void ask_line() {
    if (left == 0) return;
    __builtin_prefetch(pages + *offsets + at, 0, 2);
    at += 64;
    if (at >= width) at = 0, offsets++, left--;
  }
};

// scores[q][key] = query q · key, for Q queries `stride` floats apart. Reads keys up to a multiple of 8 / Q.
template <class E, class C, int Q>
[[gnu::noinline]] static void score(const float* query, int64_t stride, const C* const* keys, Ahead& next,
                                    int64_t count, int64_t dim, float (*scores)[TILE_KEYS]) {
  constexpr int K = 8 / Q;  // as many sums as hide the latency of one
  Ahead ahead = next;
  for (int64_t key = 0; key < count; key += K) {
    F32 sums[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sums[i] = zero();
    each_block(dim, [&](int64_t at, auto n) {
      ahead.ask<K * BLOCK * sizeof(C)>();
#pragma GCC unroll 8
      for (int k = 0; k < K; k++) {
        F32 x[PARTS<E>];
        load_block<E>(keys[key + k] + at, n, x);
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
#pragma GCC unroll 2
          for (int part = 0; part < PARTS<E>; part++) {
            F32 own = load(query + q * stride + at / STEP<E> + part * WIDTH);
            sums[q * K + k] = dot<E>(sums[q * K + k], own, x[part]);
          }
        }
      }
    });
    float out[8];
    add_across(sums, out);
    for (int q = 0; q < Q; q++) memcpy(scores[q] + key, out + q * K, K * sizeof(float));
  }
  next = ahead;
}

// body<Q>(q) for [0, count) in steps of four, then two, then one.
template <class Body>
static inline void each_few(int64_t count, Body body) {
  int64_t q = 0;
  for (; q + 4 <= count; q += 4) body.template operator()<4>(q);
  if (q + 2 <= count) body.template operator()<2>(q), q += 2;
  if (q < count) body.template operator()<1>(q);
}

// sums[q] = sums[q] * shrink[q] + weights[q] · values, for Q queries and B blocks of dimensions from `at` on.
template <class E, class C, int Q, int B, class Count>
[[gnu::noinline]] static void add_values(const float (*weights)[TILE_KEYS], const C* const* values, Ahead& next,
                                         int64_t count, int64_t at, Count n, const float* shrink, float* sums,
                                         int64_t stride) {
  Ahead ahead = next;
  F32 held[Q][B][2];
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * B; i++) held[q][i / 2][i % 2] = load(sums + q * stride + at + i * WIDTH) * set1(shrink[q]);
  }
  for (int64_t key = 0; key < count; key += STEP<E>) {
    ahead.ask<STEP<E> * B * BLOCK * sizeof(C)>();
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      F32 x[2];
      load_values<E>(values + key, at + b * BLOCK, n, x);
#pragma GCC unroll 4
      for (int q = 0; q < Q; q++) {
        F32 weight = set1(weights[q][key / STEP<E>]);
        held[q][b][0] = dot<E>(held[q][b][0], weight, x[0]);
        held[q][b][1] = dot<E>(held[q][b][1], weight, x[1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * B; i++) store(sums + q * stride + at + i * WIDTH, held[q][i / 2][i % 2]);
  }
  next = ahead;
}

// Scores [0, count) become weights relative to the largest so far, the rest up to TILE_KEYS zero; in place, as E.
template <class E>
static inline void weigh(const Scores& to_score, int64_t count, float* scores, float* most, float* total,
                         float* shrink) {
  for (int i = 0; i < TILE_KEYS; i += WIDTH) store(scores + i, to_score(load(scores + i)));
  for (int64_t i = count; i < TILE_KEYS; i++) scores[i] = -INFINITY;
  F32 peak = set1(*most), sums = zero();
  for (int i = 0; i < TILE_KEYS; i += WIDTH) peak = max(peak, load(scores + i));
  float highest = largest(peak);
  for (int i = 0; i < TILE_KEYS; i += WIDTH) {
    F32 weight = exp2(load(scores + i) - set1(highest));
    sums = sums + weight;
    store((E*)scores + i, weight);
  }
  *shrink = exp2_of(*most - highest);
  *total = *total * *shrink + sum(sums);
  *most = highest;
}

// What decode() holds of each query, in floats: the query, its sum of values, and two numbers.
template <class E>
static inline int64_t decode_floats(const AttentionArgs& args) {
  int64_t dim = round_up(args.dim, BLOCK);
  return args.heads * (dim / STEP<E> + dim + 2);
}

// A tile's keys or values of one key-value head.
template <class C>
struct Tile {
  const C* rows[TILE_KEYS];
  Tile(const void* pages, const int64_t* offsets, int64_t within) {
    for (int i = 0; i < TILE_KEYS; i++) rows[i] = (const C*)pages + offsets[i] + within;
  }
};

// One piece of a row for the key-value heads [begin, end), a tile of keys for all of them before the next.
template <class E, class C>
static inline void decode(const AttentionArgs& args, const Row& row, int64_t piece, int64_t begin, int64_t end,
                          float* partials, const Worker& worker) {
  int64_t group = args.heads / args.kv_heads, dim = round_up(args.dim, BLOCK), lanes = dim / STEP<E>;
  float* queries = (float*)worker.scratch(decode_floats<E>(args) * sizeof(float));
  float* sums = queries + args.heads * lanes;
  float* most = sums + args.heads * dim;
  float* total = most + args.heads;
  for (int64_t head = begin * group; head < end * group; head++) {
    load_query<E>(args, row, 0, head, lanes, queries + head * lanes);
    if constexpr (same<E, float>) block_order<E, C>(queries + head * lanes, dim / BLOCK);
    begin_query(args, piece, head, most + head, total + head);
  }
  memset(sums + begin * group * dim, 0, (end - begin) * group * dim * sizeof(float));

  Scores to_score = {args.scale, args.soft_cap};
  Keys keys = keys_of(row, piece);
  int64_t offsets[TILE_KEYS], next_offsets[TILE_KEYS], in_bytes[TILE_KEYS];
  locate(args, row, keys.begin, min_of(TILE_KEYS, keys.end - keys.begin), TILE_KEYS, next_offsets);
  for (int64_t position = keys.begin; position < keys.end; position += TILE_KEYS) {
    int64_t count = min_of(TILE_KEYS, keys.end - position), next = position + TILE_KEYS;
    memcpy(offsets, next_offsets, sizeof offsets);
    bool more = next < row.context;  // also where the next piece begins: most likely it is this worker's too
    if (more) locate(args, row, next, min_of(TILE_KEYS, row.context - next), TILE_KEYS, next_offsets);
    for (int i = 0; i < TILE_KEYS; i++) in_bytes[i] = (next_offsets[i] + begin * args.dim) * (int64_t)sizeof(C);
    int64_t width = (end - begin) * args.dim * (int64_t)sizeof(C);
    Ahead next_keys = {(const char*)args.key_pages, in_bytes, more ? TILE_KEYS : 0, width};
    Ahead next_values = {(const char*)args.value_pages, in_bytes, more ? TILE_KEYS : 0, width};
    Ahead nothing = {nullptr, in_bytes, 0, 0};  // for all but the first queries that meet a tile
    for (int64_t kv_head = begin; kv_head < end; kv_head++) {
      Tile<C> key(args.key_pages, offsets, kv_head * args.dim), value(args.value_pages, offsets, kv_head * args.dim);
      alignas(64) float scores[SHARED_BY][TILE_KEYS] = {};
      float shrink[SHARED_BY];
      int64_t first = kv_head * group;
      each_few(group, [&]<int Q>(int64_t q) {
        score<E, C, Q>(queries + (first + q) * lanes, lanes, key.rows, q == 0 ? next_keys : nothing, count, args.dim,
                       scores + q);
      });
      for (int64_t q = 0; q < group; q++) {
        weigh<E>(to_score, count, scores[q], most + first + q, total + first + q, shrink + q);
      }
      each_few(group, [&]<int Q>(int64_t q) {
        Ahead& asked = q == 0 ? next_values : nothing;
        float* own = sums + (first + q) * dim;
        constexpr int B = 4 / Q;
        int64_t at = 0;
        for (; at + B * BLOCK <= args.dim; at += B * BLOCK) {
          add_values<E, C, Q, B>(scores + q, value.rows, asked, count, at, Full(), shrink + q, own, dim);
        }
        for (; at + BLOCK <= args.dim; at += BLOCK) {
          add_values<E, C, Q, 1>(scores + q, value.rows, asked, count, at, Full(), shrink + q, own, dim);
        }
        if (at < args.dim) {
          add_values<E, C, Q, 1>(scores + q, value.rows, asked, count, at, args.dim - at, shrink + q, own, dim);
        }
      });
    }
  }
  for (int64_t head = begin * group; head < end * group; head++) {
    natural_order<E, C>(sums + head * dim, dim / BLOCK);
    end_query(args, row, piece, 0, head, most[head], total[head], sums + head * dim, partials);
  }
}

}  // namespace localllm::LANE
