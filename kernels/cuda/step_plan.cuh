// The plan of a step: products in tiles of 8 outputs, contexts in parts, and the layouts of shared and global memory.
#pragma once

#include <algorithm>

#include "step.h"

namespace localllm::cuda {
namespace {

constexpr int CONSUMERS = 8;                    // consumer warps
constexpr int CONSUMER_THREADS = CONSUMERS * 32;  // threads of the consumer warps
constexpr int PRODUCER_THREADS = 128;           // threads of the producer warpgroup; three of its warps work
constexpr int COLUMNS = 1024;                   // inputs per ring stage, for 8 outputs
constexpr int PITCH = COLUMNS * 2 + 64;         // bytes between outputs of a stage, without bank conflicts
constexpr int STAGE = 8 * PITCH;
constexpr int MOST_STAGES = 8;
constexpr int COPIES = 4;                       // copies of words that all blocks read, to spread the reads
constexpr int SMALL = 24;                       // limit of stages per block in a small layer (see `in_flight`)
constexpr int CACHED = 128;                     // prefetched positions per unit of attention
constexpr int PART = 128;                       // minimum of positions per part of a context

enum Phase { QKV, OUT, GATE_UP, DOWN };

// The words of one exchange between blocks (step_words.cuh): one word per pair of activations, in `copies` copies.
struct Exchange {
  int64_t place;  // offset in StepArgs::shared, in 64-bit words
  int pairs, copies;
};

struct Product {
  int tiles, ins;
  Exchange from, to;
  int stages;           // ring stages per tile
  int each, remainder;  // tiles of every block; remaining tiles, which go to some blocks
  int concurrent;       // tiles that the warps of a block compute at the same time; their stages fit in the ring
  bool split;           // true: a block has at most one tile, and its warps split the tile's stages
};

// The kernel's argument; computed on the host to save registers. `layers` … `ring` are byte offsets in shared memory,
// in this order: barriers (0), layers, unit of attention, sums of squares, norm, residual stream, activations of qkv
// and gate_up, activations of out and down (also used by attention), sums of a split tile, prefetched keys and values,
// ring.
struct Plan {
  StepArgs args;
  Product products[4];
  int64_t parts, end;  // offsets in words: partial results of attention, and the total size
  int each;            // words of a partial result of attention
  int blocks, group, most_parts;
  float inverse;       // 1 / hidden
  int ahead;           // prefetched positions per unit of attention: CACHED, or 0 without room
  int layers, unit, squares, norm, stream, x[2], sums, cache, ring;
  int stages, in_flight;  // ring stages, a power of two; limit of stages in flight

  // Bytes between prefetched positions, without bank conflicts between the lanes of a quarter warp.
  static __host__ __device__ constexpr int key_pitch(int dim) { return dim * 2 + 64; }
  static __host__ __device__ constexpr int value_pitch(int dim) { return dim * 2 + 16; }
  static int up(int bytes) { return (bytes + 127) / 128 * 128; }

  Plan(const StepArgs& a, int blocks, int limit)
      : args(a), blocks(blocks), group(a.heads / a.kv_heads), inverse(1.0f / float(a.hidden)) {
    const int qkv = (a.heads + 2 * a.kv_heads) * a.dim, seen = a.heads * a.dim;
    place(qkv, seen);
    most_parts = std::min(STEP_SPLITS, std::max(1, blocks / a.kv_heads));
    // 8 query heads, a key and a value; then the partial results of the warps.
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
    // At full memory bandwidth the latency of words grows, and small layers are bound by it: limit the stages in
    // flight.
    int tiles = 0;
    for (Product& one : products) {
      one.concurrent = std::max(1, std::min(CONSUMERS, stages / one.stages));
      one.split = one.tiles <= blocks && one.stages > 1 && one.stages <= std::min(CONSUMERS, stages);
      tiles += one.tiles * one.stages;
    }
    in_flight = tiles <= SMALL * blocks ? 1 : stages;
  }
  void place(int qkv, int seen) {
    const StepArgs& a = args;
    int64_t at = MOST_BLOCKS / 2;  // the words before it: each block's last epoch, uint32
    auto next = [&](int width, int copies) {
      Exchange one{at, width / 2, copies};
      at += int64_t(copies) * one.pairs;
      return one;
    };
    const Exchange heads = next(qkv, 1), answers = next(seen, COPIES), added = next(a.hidden, COPIES),
                   gated = next(a.inner, COPIES), moved = next(a.hidden, COPIES);
    products[QKV] = {qkv / 8, a.hidden, moved, heads};
    products[OUT] = {a.hidden / 8, seen, answers, added};
    products[GATE_UP] = {a.inner / 4, a.hidden, added, gated};  // a tile: 4 gates and the 4 values they multiply
    products[DOWN] = {a.hidden / 8, a.inner, gated, moved};
    for (Product& one : products) {
      one.stages = (one.ins + COLUMNS - 1) / COLUMNS;
      one.each = one.tiles / blocks, one.remainder = one.tiles % blocks;
    }
    parts = at, each = group * a.dim + 2 * group;
    end = parts + int64_t(a.kv_heads) * STEP_SPLITS * each;
  }
};

}  // namespace
}  // namespace localllm::cuda
