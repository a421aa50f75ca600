// How a step is cut up: products into tiles of 8 outputs, contexts into parts, and what lies where.
#pragma once

#include <algorithm>

#include "step.h"

namespace localllm::cuda {
namespace {

constexpr int CONSUMERS = 8;                    // warps that multiply; one more fetches weights
constexpr int TEAM = CONSUMERS * 32;            // their threads
constexpr int COLUMNS = 1024;                   // inputs of a stage of the ring, of 8 outputs
constexpr int PITCH = COLUMNS * 2 + 64;         // bytes: neighbouring rows lie in other banks
constexpr int STAGE = 8 * PITCH;
constexpr int LEAST_STAGES = 3, MOST_STAGES = 16;
constexpr int TILES = 8;                        // whose sums are added up together
constexpr int PART = 128;                       // positions that make a part of a context worth its while

enum Phase { QKV, OUT, GATE_UP, DOWN };

struct Product {
  int tiles, ins;
};

__host__ __device__ inline Product product_of(const StepArgs& a, int phase) {
  switch (phase) {
    case QKV: return {(a.heads + 2 * a.kv_heads) * a.dim / 8, a.hidden};
    case OUT: return {a.hidden / 8, a.heads * a.dim};
    case GATE_UP: return {a.inner / 4, a.hidden};  // four gates and the four that they gate
    default: return {a.hidden / 8, a.inner};
  }
}

// Words of one row that blocks hand each other (step_words.cuh), in the order in which they lie, each [STEP_ROWS, …].
struct Places {
  int64_t qkv, seen, added, gated, moved, parts, end;  // where each begins: 64-bit words
  int each;                                            // words of a part of a context, of one kv head and row

  explicit Places(const StepArgs& a) {
    int group = a.heads / a.kv_heads;
    each = group * a.dim + 2 * group;
    qkv = MOST_BLOCKS / 2;  // before it: each block's number of the last turn
    seen = qkv + STEP_ROWS * ((a.heads + 2 * a.kv_heads) * a.dim / 2);
    added = seen + STEP_ROWS * (a.heads * a.dim / 2);
    gated = added + STEP_ROWS * (a.hidden / 2);
    moved = gated + STEP_ROWS * (a.inner / 2);
    parts = moved + STEP_ROWS * (a.hidden / 2);
    end = parts + int64_t(STEP_ROWS) * a.kv_heads * STEP_SPLITS * each;
  }
};

// Shared memory of a block, in bytes from its start: the ring's barriers, layers, rows' contexts, sums of squares, norm,
// stream, activations (or what attention needs), sums, and the ring.
struct Room {
  int layers, contexts, squares, norm, stream, x, sums, ring, pitch, stages;

  static int up(int bytes) { return (bytes + 127) / 128 * 128; }
  Room(const StepArgs& a, int limit) {
    int deepest = a.hidden > a.inner ? a.hidden : a.inner, group = a.heads / a.kv_heads;
    deepest = deepest > a.heads * a.dim ? deepest : a.heads * a.dim;
    pitch = deepest * 2 + 64;
    // Queries of 8 heads, a key and a value; then what the warps have found.
    int attention = 10 * a.dim * 2 + CONSUMERS * group * (a.dim + 2) * 4;
    layers = MOST_STAGES * 16;
    contexts = layers + a.layer_count * int(sizeof(StepLayer));
    squares = contexts + STEP_ROWS * 4;
    norm = up(squares + a.rows * (a.hidden / 128) * 4);
    stream = norm + up(a.hidden * 2);
    x = stream + up(a.rows * a.hidden * 2);
    sums = x + up(a.rows * pitch > attention ? a.rows * pitch : attention);
    ring = sums + up(2 * TILES * CONSUMERS * a.rows * 8 * 4);
    stages = (limit - ring) / STAGE;
    if (stages > MOST_STAGES) stages = MOST_STAGES;
  }
};

struct Plan {  // what the kernel is given: made on the host, as its threads have no registers to spare
  StepArgs args;
  Room room;
  Places places;
};

// A context in parts, each of `each` positions but the last.
struct Parts {
  int count, each;
  __device__ Parts(int context, int most) {
    int wanted = min(most, (context + PART - 1) / PART);
    each = ((context + wanted - 1) / wanted + 15) / 16 * 16;
    count = (context + each - 1) / each;
  }
};

}  // namespace
}  // namespace localllm::cuda
