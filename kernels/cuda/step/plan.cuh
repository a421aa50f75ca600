// The plan of a step: products in tiles of 8 outputs, contexts in chunks, and the layouts of shared and global memory.
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
constexpr int MAX_STAGES = 8;
constexpr int COPIES = 4;                       // copies of words that all blocks read, to spread the reads
constexpr int SMALL = 24;                       // limit of stages per block in a small layer (see `in_flight`)
constexpr int CACHED = 128;                     // prefetched positions per unit of attention
constexpr int MIN_CHUNK = 128;                  // minimum of positions per chunk of a context

enum Phase { QKV, OUT, GATE_UP, DOWN };

// The words of one exchange between blocks (words.cuh): one word per pair of activations. The words are stored
// `copies` times.
struct Exchange {
  int64_t offset;  // offset in StepArgs::shared, in 64-bit words
  int pairs, copies;
};

struct Product {
  int tiles, in_features;
  Exchange from, to;
  int stages;           // ring stages per tile
  int tiles_per_block, remainder;  // tiles of every block; remaining tiles, which go to some blocks
  int concurrent;       // tiles that the warps of a block compute at the same time; their stages fit in the ring
  bool split;           // true: a block has at most one tile, and its warps split the tile's stages
};

// The kernel's argument. The host computes it, which saves registers.
//
// The fields `layers` to `ring` are byte offsets of regions in shared memory. The barriers are at offset 0. The
// regions follow in the order of the fields: the table of layers, the task of attention, sums of squares, the norm,
// the residual stream, activations for qkv and gate_up, activations for out and down (attention uses them too), the
// partial sums of a split tile, prefetched keys and values, and the ring of weights.
struct Plan {
  StepArgs args;
  Product products[4];
  int64_t partials, end;  // offsets in words: partial results of attention, and the total size
  int partial_words;         // words of a partial result of attention
  int blocks, group, max_chunks;
  float inverse;       // 1 / hidden
  int prefetched;      // prefetched positions per unit of attention: CACHED, or 0 without room
  int layers, unit, squares, norm, stream, x[2], sums, cache, ring;
  int stages, in_flight;  // ring stages, a power of two; limit of stages in flight

  // Bytes between prefetched positions, without bank conflicts between the lanes of a quarter warp.
  static __host__ __device__ constexpr int key_pitch(int dim) { return dim * 2 + 64; }
  static __host__ __device__ constexpr int value_pitch(int dim) { return dim * 2 + 16; }
  static int align(int bytes) { return (bytes + 127) / 128 * 128; }

  Plan(const StepArgs& a, int blocks, int limit)
      : args(a), blocks(blocks), group(a.heads / a.kv_heads), inverse(1.0f / float(a.hidden)) {
    const int qkv = (a.heads + 2 * a.kv_heads) * a.dim, attended = a.heads * a.dim;
    place_exchanges(qkv, attended);
    max_chunks = std::min(MAX_STEP_CHUNKS, std::max(1, blocks / a.kv_heads));
    // Bytes of 8 query heads, a key and a value, and of the partial results of the warps.
    const int attention = 10 * a.dim * 2 + CONSUMERS * group * (a.dim + 2) * 4;
    layers = MAX_STAGES * 16 + 16;
    unit = layers + a.layer_count * int(sizeof(StepLayer));
    squares = unit + 128;
    norm = align(squares + CONSUMERS * 4);
    stream = norm + align(a.hidden * 2);
    x[0] = stream + align(a.hidden * 2);
    x[1] = x[0] + align(a.hidden * 2);
    sums = x[1] + align(std::max({a.inner * 2, attended * 2, attention}));
    cache = sums + align(CONSUMERS * 8 * 4);
    const int bytes = CACHED * (key_pitch(a.dim) + value_pitch(a.dim));
    prefetched = cache + bytes + MAX_STAGES * STAGE <= limit ? CACHED : 0;
    ring = cache + (prefetched ? bytes : 0);
    for (stages = MAX_STAGES; ring + stages * STAGE > limit && stages > 0;) stages /= 2;
    // At full memory bandwidth, the exchange of words between blocks takes longer. This latency bounds small layers, so
    // limit their stages in flight.
    int tiles = 0;
    for (Product& product : products) {
      product.concurrent = std::max(1, std::min(CONSUMERS, stages / product.stages));
      product.split = product.tiles <= blocks && product.stages > 1 && product.stages <= std::min(CONSUMERS, stages);
      tiles += product.tiles * product.stages;
    }
    in_flight = tiles <= SMALL * blocks ? 1 : stages;
  }
  void place_exchanges(int qkv, int attended) {
    const StepArgs& a = args;
    int64_t next_word = MAX_BLOCKS / 2;  // the words before this index store the last epoch of each block, as uint32
    auto next = [&](int width, int copies) {
      Exchange exchange{next_word, width / 2, copies};
      next_word += int64_t(copies) * exchange.pairs;
      return exchange;
    };
    const Exchange heads = next(qkv, 1);
    const Exchange attention = next(attended, COPIES);
    const Exchange added = next(a.hidden, COPIES);
    const Exchange gated = next(a.inner, COPIES);
    const Exchange summed = next(a.hidden, COPIES);
    products[QKV] = {qkv / 8, a.hidden, summed, heads};
    products[OUT] = {a.hidden / 8, attended, attention, added};
    products[GATE_UP] = {a.inner / 4, a.hidden, added, gated};  // a tile: 4 gates and the 4 values they multiply
    products[DOWN] = {a.hidden / 8, a.inner, gated, summed};
    for (Product& product : products) {
      product.stages = (product.in_features + COLUMNS - 1) / COLUMNS;
      product.tiles_per_block = product.tiles / blocks;
      product.remainder = product.tiles % blocks;
    }
    partials = next_word;
    partial_words = group * a.dim + 2 * group;
    end = partials + int64_t(a.kv_heads) * MAX_STEP_CHUNKS * partial_words;
  }
};

}  // namespace
}  // namespace localllm::cuda
