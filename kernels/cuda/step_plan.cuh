// How a step is cut up: products into tiles of 8 outputs, contexts into parts, and what lies where.
#pragma once

#include <algorithm>

#include "step.h"

namespace localllm::cuda {
namespace {

constexpr int CONSUMERS = 8;                    // warps that multiply
constexpr int TEAM = CONSUMERS * 32;            // their threads
constexpr int FETCHERS = 128;                   // of which a warp fetches weights: registers go to four warps at a time
constexpr int COLUMNS = 1024;                   // inputs of a stage of the ring, of 8 outputs
constexpr int PITCH = COLUMNS * 2 + 64;         // bytes: neighbouring rows lie in other banks
constexpr int STAGE = 8 * PITCH;
constexpr int LEAST_STAGES = 3, MOST_STAGES = 16;
constexpr int TILES = 8;                        // whose sums are added up together
constexpr int TABLE = CONSUMERS * 8 + 8;        // floats of a tile's sums: neighbouring tiles lie in other banks
constexpr int COPIES = 4;                       // of words that all blocks read: a place that all ask for is slow
constexpr int PART = 128;                       // positions that make a part of a context worth its while,
constexpr int ALONE = 640;                      // if there are more than these: parts have to be merged

enum Phase { QKV, OUT, GATE_UP, DOWN };

// Words that blocks hand each other (step_words.cuh): `copies` times as many as there are pairs of activations.
struct Exchange {
  int64_t place;  // in 64-bit words
  int pairs, copies;
};

struct Product {
  int tiles, ins;
  int uneven;  // tiles that are left when all blocks have taken as many
  Exchange from, to;
};

// What the kernel is given: made on the host, as its threads have no registers to spare. Shared memory of a block, in
// bytes from its start: the ring's barriers, layers, the unit of attention, sums of squares, norm, stream, activations
// (or what attention needs), sums, and the ring.
struct Plan {
  StepArgs args;
  Product products[4];
  int64_t parts, end;  // places after those of the products: parts of contexts, and what is behind all
  int each;            // words of a part of a context, of one kv head
  int blocks, group, most_parts;
  float inverse;  // of `hidden`
  int layers, unit, squares, norm, stream, x, sums, ring, stages;

  static int up(int bytes) { return (bytes + 127) / 128 * 128; }

  Plan(const StepArgs& a, int blocks, int limit)
      : args(a), blocks(blocks), group(a.heads / a.kv_heads), inverse(1.0f / float(a.hidden)) {
    const int qkv = (a.heads + 2 * a.kv_heads) * a.dim, seen = a.heads * a.dim;
    place(qkv, seen);
    most_parts = std::min(STEP_SPLITS, std::max(1, blocks / a.kv_heads));
    // Queries of 8 heads, a key and a value; then what the warps have found.
    const int attention = 10 * a.dim * 2 + CONSUMERS * group * (a.dim + 2) * 4;
    layers = MOST_STAGES * 16;
    unit = layers + a.layer_count * int(sizeof(StepLayer));
    squares = unit + 128;
    norm = up(squares + CONSUMERS * 4);
    stream = norm + up(a.hidden * 2);
    x = stream + up(a.hidden * 2);
    sums = x + up(std::max({a.hidden * 2, a.inner * 2, seen * 2, attention}));
    ring = sums + up(2 * TILES * TABLE * 4);
    stages = std::min((limit - ring) / STAGE, MOST_STAGES);
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
    products[QKV] = {qkv / 8, a.hidden, 0, moved, heads};
    products[OUT] = {a.hidden / 8, seen, 0, answers, added};
    products[GATE_UP] = {a.inner / 4, a.hidden, 0, added, gated};  // four gates and the four that they gate
    products[DOWN] = {a.hidden / 8, a.inner, 0, gated, moved};
    for (Product& one : products) one.uneven = one.tiles % blocks;
    parts = at, each = group * a.dim + 2 * group;
    end = parts + int64_t(a.kv_heads) * STEP_SPLITS * each;
  }
};

}  // namespace
}  // namespace localllm::cuda
