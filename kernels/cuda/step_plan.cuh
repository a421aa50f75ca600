// How a step is cut up: products into tiles of 8 outputs, contexts into parts, and what lies where.
#pragma once

#include <algorithm>

#include "step.h"

namespace localllm::cuda {
namespace {

constexpr int CONSUMERS = 8;                    // warps that multiply
constexpr int TEAM = CONSUMERS * 32;            // their threads
constexpr int FETCHERS = 128;                   // of three warps that fetch: registers go to four warps at a time
constexpr int COLUMNS = 1024;                   // inputs of a stage of the ring, of 8 outputs
constexpr int PITCH = COLUMNS * 2 + 64;         // bytes: neighbouring rows lie in other banks
constexpr int STAGE = 8 * PITCH;
constexpr int MOST_STAGES = 8;
constexpr int COPIES = 4;                       // of words that all blocks read: a place that all ask for is slow
constexpr int SMALL = 24;                       // stages of a block in a small layer, at most
constexpr int CACHED = 128;                     // positions of a unit of attention that are fetched ahead
constexpr int PART = 128;                       // positions that make a part of a context worth its while

enum Phase { QKV, OUT, GATE_UP, DOWN };

// Words that blocks hand each other (step_words.cuh): `copies` times as many as there are pairs of activations.
struct Exchange {
  int64_t place;  // in 64-bit words
  int pairs, copies;
};

struct Product {
  int tiles, ins;
  Exchange from, to;
  int stages;        // of a tile
  int each, uneven;  // tiles of every block, and how many are left then
  int together;      // tiles of a block that are multiplied side by side: their stages fit the ring
  bool split;        // no block has two tiles, so that all of its warps share one: each has a stage
};

// What the kernel is given: made on the host, as its threads have no registers to spare. Shared memory of a block, in
// bytes from its start: barriers, layers, the unit of attention, sums of squares, norm, stream, activations of products
// that normalise them, those of others (or what attention needs), sums of a tile that warps share, keys and values that
// were fetched ahead, and the ring.
struct Plan {
  StepArgs args;
  Product products[4];
  int64_t parts, end;  // places after those of the products: parts of contexts, and what is behind all
  int each;            // words of a part of a context, of one kv head
  int blocks, group, most_parts;
  float inverse;       // of `hidden`
  int ahead;           // positions of a unit of attention that are fetched ahead
  int layers, unit, squares, norm, stream, x[2], sums, cache, ring;
  int stages, asked;  // of the ring, a power of two, and how many of them are under way at the same time

  // Bytes of a position that was fetched ahead: what a quarter of a warp reads lies in other banks.
  static __host__ __device__ constexpr int key_pitch(int dim) { return dim * 2 + 64; }
  static __host__ __device__ constexpr int value_pitch(int dim) { return dim * 2 + 16; }
  static int up(int bytes) { return (bytes + 127) / 128 * 128; }

  Plan(const StepArgs& a, int blocks, int limit)
      : args(a), blocks(blocks), group(a.heads / a.kv_heads), inverse(1.0f / float(a.hidden)) {
    const int qkv = (a.heads + 2 * a.kv_heads) * a.dim, seen = a.heads * a.dim;
    place(qkv, seen);
    most_parts = std::min(STEP_SPLITS, std::max(1, blocks / a.kv_heads));
    // Queries of 8 heads, a key and a value; then what the warps have found.
    const int attention = 10 * a.dim * 2 + CONSUMERS * group * (a.dim + 2) * 4;
    layers = MOST_STAGES * 16 + 16;
    unit = layers + a.layer_count * int(sizeof(StepLayer));
    squares = unit + 128;
    norm = up(squares + CONSUMERS * 4);
    stream = norm + up(a.hidden * 2);
    x[0] = stream + up(a.hidden * 2);
    x[1] = x[0] + up(a.hidden * 2);
    sums = x[1] + up(std::max({a.inner * 2, seen * 2, attention}));
    cache = sums + up(CONSUMERS * 8 * 4);
    const int bytes = CACHED * (key_pitch(a.dim) + value_pitch(a.dim));
    ahead = cache + bytes + MOST_STAGES * STAGE <= limit ? CACHED : 0;
    ring = cache + (ahead ? bytes : 0);
    for (stages = MOST_STAGES; ring + stages * STAGE > limit && stages > 0;) stages /= 2;
    // A memory that is asked for all that it can give makes words wait, of which small layers mostly consist.
    int tiles = 0;
    for (Product& one : products) {
      one.together = std::max(1, std::min(CONSUMERS, stages / one.stages));
      one.split = one.tiles <= blocks && one.stages > 1 && one.stages <= std::min(CONSUMERS, stages);
      tiles += one.tiles * one.stages;
    }
    asked = tiles <= SMALL * blocks ? 1 : stages;
  }
  void place(int qkv, int seen) {
    const StepArgs& a = args;
    int64_t at = MOST_BLOCKS / 2;  // before it: each block's number of the last turn
    auto next = [&](int width, int copies) {
      Exchange one{at, width / 2, copies};
      at += int64_t(copies) * one.pairs;
      return one;
    };
    const Exchange heads = next(qkv, 1), answers = next(seen, COPIES), added = next(a.hidden, COPIES),
                   gated = next(a.inner, COPIES), moved = next(a.hidden, COPIES);
    products[QKV] = {qkv / 8, a.hidden, moved, heads};
    products[OUT] = {a.hidden / 8, seen, answers, added};
    products[GATE_UP] = {a.inner / 4, a.hidden, added, gated};  // four gates and the four that they gate
    products[DOWN] = {a.hidden / 8, a.inner, gated, moved};
    for (Product& one : products) {
      one.stages = (one.ins + COLUMNS - 1) / COLUMNS;
      one.each = one.tiles / blocks, one.uneven = one.tiles % blocks;
    }
    parts = at, each = group * a.dim + 2 * group;
    end = parts + int64_t(a.kv_heads) * STEP_SPLITS * each;
  }
};

}  // namespace
}  // namespace localllm::cuda
