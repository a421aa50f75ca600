// Attention of rows of one token. It reads every key and value once, directly from the pages, for all queries that
// share its kv head. Memory bandwidth limits it, so it prefetches the next tile of keys and values while it computes
// with this one.
#pragma once

#include "plan.h"
#include "result.h"
#include "vectors.h"
#include "softmax.h"

namespace localllm::VARIANT {

constexpr int TILE_KEYS = 32;

// Prefetches the next tile in small portions, in the order of memory addresses, which is the fastest order. The loops
// below work on a local copy of it, which the compiler keeps in registers; they are not inlined for the same reason.
struct TilePrefetch {
  const char* pages;
  const int64_t* offsets;  // [keys]: byte offset of each key in the pages
  int64_t keys;            // number of keys that are not yet prefetched
  int64_t width;           // bytes of a key
  int64_t offset = 0;      // bytes of the current key that are already prefetched
  int pending = 0;         // bytes passed to fetch() that do not fill a cache line yet

  template <int BYTES>
  void fetch() {
    if constexpr (BYTES % 64 == 0) {
      for (int line = 0; line < BYTES / 64; line++) fetch_line();
    } else {
      for (pending += BYTES; pending >= 64; pending -= 64) fetch_line();
    }
  }

  void fetch_line() {
    if (keys == 0) return;
    __builtin_prefetch(pages + *offsets + offset, 0, 2);
    offset += 64;
    if (offset < width) return;
    offset = 0;
    offsets++;
    keys--;
  }
};

// scores[q][key] = query q · key, for Q queries and `count` keys. Consecutive queries are `stride` floats apart. Also
// computes the scores of padding keys: it rounds `count` up to a multiple of 8 / Q.
template <class E, class C, int Q>
[[gnu::noinline]] static void score(const float* query, int64_t stride, const C* const* keys, TilePrefetch& next,
                                    int64_t count, int64_t dim, float (*scores)[TILE_KEYS]) {
  constexpr int K = 8 / Q;  // keys at a time: 8 independent sums hide the latency of an addition
  TilePrefetch prefetch = next;
  for (int64_t key = 0; key < count; key += K) {
    F32 sums[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sums[i] = zero();
    each_block(dim, [&](int64_t first_dim, auto n) {
      prefetch.fetch<K * BLOCK * sizeof(C)>();
#pragma GCC unroll 8
      for (int k = 0; k < K; k++) {
        F32 x[BLOCK_VECTORS<E>];
        load_block<E>(keys[key + k] + first_dim, n, x);
#pragma GCC unroll 4
        for (int q = 0; q < Q; q++) {
#pragma GCC unroll 2
          for (int i = 0; i < BLOCK_VECTORS<E>; i++) {
            F32 lanes = load(query + q * stride + first_dim / STEP<E> + i * WIDTH);
            sums[q * K + k] = dot<E>(sums[q * K + k], lanes, x[i]);
          }
        }
      }
    });
    float out[8];
    add_across(sums, out);
    for (int q = 0; q < Q; q++) memcpy(scores[q] + key, out + q * K, K * sizeof(float));
  }
  next = prefetch;
}

// Calls body<Q>(q) for the queries [0, count) in groups of Q = 4, then 2, then 1.
template <class Body>
static inline void each_query_group(int64_t count, Body body) {
  int64_t q = 0;
  for (; q + 4 <= count; q += 4) body.template operator()<4>(q);
  if (q + 2 <= count) {
    body.template operator()<2>(q);
    q += 2;
  }
  if (q < count) body.template operator()<1>(q);
}

// sums[q] = sums[q] * factors[q] + weights[q] · values, for Q queries and B blocks of dimensions from `first_dim` on.
template <class E, class C, int Q, int B, class Count>
[[gnu::noinline]] static void add_values(const float (*weights)[TILE_KEYS], const C* const* values, TilePrefetch& next,
                                         int64_t count, int64_t first_dim, Count n, const float* factors, float* sums,
                                         int64_t stride) {
  TilePrefetch prefetch = next;
  F32 acc[Q][B][2];
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * B; i++)
      acc[q][i / 2][i % 2] = load(sums + q * stride + first_dim + i * WIDTH) * set1(factors[q]);
  }
  for (int64_t key = 0; key < count; key += STEP<E>) {
    prefetch.fetch<STEP<E> * B * BLOCK * sizeof(C)>();
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      F32 x[2];
      load_values<E>(values + key, first_dim + b * BLOCK, n, x);
#pragma GCC unroll 4
      for (int q = 0; q < Q; q++) {
        F32 weight = set1(weights[q][key / STEP<E>]);
        acc[q][b][0] = dot<E>(acc[q][b][0], weight, x[0]);
        acc[q][b][1] = dot<E>(acc[q][b][1], weight, x[1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Q; q++) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * B; i++) store(sums + q * stride + first_dim + i * WIDTH, acc[q][i / 2][i % 2]);
  }
  next = prefetch;
}

// Softmax of one tile, in place: replaces the scores [0, count) by weights of type E, relative to the largest score so
// far, and the rest of the TILE_KEYS scores by 0. `factor` receives the factor for the earlier sums.
template <class E>
static inline void softmax_tile(const Scores& to_score, int64_t count, float* scores, float* peak, float* total,
                                float* factor) {
  for (int i = 0; i < TILE_KEYS; i += WIDTH) store(scores + i, to_score(load(scores + i)));
  for (int64_t i = count; i < TILE_KEYS; i++) scores[i] = -INFINITY;
  F32 peaks = set1(*peak), sums = zero();
  for (int i = 0; i < TILE_KEYS; i += WIDTH) peaks = max(peaks, load(scores + i));
  float highest = largest(peaks);
  for (int i = 0; i < TILE_KEYS; i += WIDTH) {
    F32 weight = exp2(load(scores + i) - set1(highest));
    sums = sums + weight;
    store((E*)scores + i, weight);
  }
  *factor = exp2_of(*peak - highest);
  *total = *total * *factor + sum(sums);
  *peak = highest;
}

// Scratch memory of decode() in floats. Per query: the query, its weighted sum of values, its largest score, and the
// sum of its softmax weights.
template <class E>
static inline int64_t decode_floats(const AttentionArgs& args) {
  int64_t dim = round_up(args.dim, BLOCK);
  return args.heads * (dim / STEP<E> + dim + 2);
}

// Pointers to the keys or values of one kv head in a tile.
template <class C>
struct Tile {
  const C* rows[TILE_KEYS];
  Tile(const void* pages, const int64_t* offsets, int64_t within) {
    for (int i = 0; i < TILE_KEYS; i++) rows[i] = (const C*)pages + offsets[i] + within;
  }
};

// Computes one chunk of a row for the kv heads [begin, end). It processes a tile of keys for all heads before the next
// tile.
template <class E, class C>
static inline void decode(const AttentionArgs& args, const Row& row, int64_t chunk, int64_t begin, int64_t end,
                          float* partials, const Worker& worker) {
  int64_t group = args.heads / args.kv_heads, dim = round_up(args.dim, BLOCK);
  int64_t lanes = dim / STEP<E>;
  float* queries = (float*)worker.scratch(decode_floats<E>(args) * sizeof(float));
  float* sums = queries + args.heads * lanes;
  float* peak = sums + args.heads * dim;
  float* total = peak + args.heads;
  for (int64_t head = begin * group; head < end * group; head++) {
    load_query<E>(args, row, 0, head, lanes, queries + head * lanes);
    if constexpr (same<E, float>) block_order<E, C>(queries + head * lanes, dim / BLOCK);
    begin_query(args, chunk, head, peak + head, total + head);
  }
  memset(sums + begin * group * dim, 0, (end - begin) * group * dim * sizeof(float));

  Scores to_score = {args.scale, args.soft_cap};
  Keys keys = keys_of(row, chunk);
  int64_t offsets[TILE_KEYS], next_offsets[TILE_KEYS], byte_offsets[TILE_KEYS];
  locate(args, row, keys.begin, min_of(TILE_KEYS, keys.end - keys.begin), TILE_KEYS, next_offsets);
  for (int64_t position = keys.begin; position < keys.end; position += TILE_KEYS) {
    int64_t count = min_of(TILE_KEYS, keys.end - position), next = position + TILE_KEYS;
    memcpy(offsets, next_offsets, sizeof offsets);
    bool more = next < row.context;  // prefetch also into the next chunk: usually the same worker computes it
    if (more) locate(args, row, next, min_of(TILE_KEYS, row.context - next), TILE_KEYS, next_offsets);
    for (int i = 0; i < TILE_KEYS; i++) byte_offsets[i] = (next_offsets[i] + begin * args.dim) * (int64_t)sizeof(C);
    int64_t width = (end - begin) * args.dim * (int64_t)sizeof(C);
    TilePrefetch next_keys = {(const char*)args.key_pages, byte_offsets, more ? TILE_KEYS : 0, width};
    TilePrefetch next_values = {(const char*)args.value_pages, byte_offsets, more ? TILE_KEYS : 0, width};
    // Only the first query group of a kv head prefetches the next tile.
    TilePrefetch no_prefetch = {nullptr, byte_offsets, 0, 0};
    for (int64_t kv_head = begin; kv_head < end; kv_head++) {
      Tile<C> key(args.key_pages, offsets, kv_head * args.dim), value(args.value_pages, offsets, kv_head * args.dim);
      alignas(64) float scores[MAX_DECODE_GROUP][TILE_KEYS] = {};
      float factors[MAX_DECODE_GROUP];
      int64_t first = kv_head * group;
      each_query_group(group, [&]<int Q>(int64_t q) {
        TilePrefetch& prefetch = q == 0 ? next_keys : no_prefetch;
        score<E, C, Q>(queries + (first + q) * lanes, lanes, key.rows, prefetch, count, args.dim, scores + q);
      });
      for (int64_t q = 0; q < group; q++) {
        softmax_tile<E>(to_score, count, scores[q], peak + first + q, total + first + q, factors + q);
      }
      each_query_group(group, [&]<int Q>(int64_t q) {
        TilePrefetch& prefetch = q == 0 ? next_values : no_prefetch;
        float* query_sums = sums + (first + q) * dim;
        constexpr int B = 4 / Q;
        int64_t first_dim = 0;
        for (; first_dim + B * BLOCK <= args.dim; first_dim += B * BLOCK) {
          add_values<E, C, Q, B>(scores + q, value.rows, prefetch, count, first_dim, Full(), factors + q, query_sums,
                                 dim);
        }
        for (; first_dim + BLOCK <= args.dim; first_dim += BLOCK) {
          add_values<E, C, Q, 1>(scores + q, value.rows, prefetch, count, first_dim, Full(), factors + q, query_sums,
                                 dim);
        }
        if (first_dim < args.dim) {
          add_values<E, C, Q, 1>(scores + q, value.rows, prefetch, count, first_dim, args.dim - first_dim, factors + q,
                                 query_sums, dim);
        }
      });
    }
  }
  for (int64_t head = begin * group; head < end * group; head++) {
    natural_order<E, C>(sums + head * dim, dim / BLOCK);
    end_query(args, row, chunk, 0, head, peak[head], total[head], sums + head * dim, partials);
  }
}

}  // namespace localllm::VARIANT
