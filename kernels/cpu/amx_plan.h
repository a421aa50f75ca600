// How a product is cut for the tiles, and where its rearranged activations lie in shared memory.
//
// A step is what one product of tiles covers of the inputs: `depth` bytes of activations. Rows come in blocks of 32,
// two tiles; the last block has one tile where 16 rows suffice. A chunk is as many steps as are done at a time.
// Activations: [chunks][blocks][steps of the chunk][tiles][16 rows][depth], so that what is read again and again in a
// chunk lies together (apart by powers of two it would compete for few lines of the cache), then the scales of int8
// activations, float [blocks][groups][32], then a counter for each block (amx_tasks.h).
#pragma once

#include "amx.h"

namespace localllm::LANE {
namespace {  // a member function that is not inlined stays this file's own

constexpr int64_t BLOCK = 2 * TILE_ROWS;  // rows
constexpr int64_t COUNTER_BYTES = 64;  // a cache line of its own

struct Plan {
  Product product;
  int64_t depth;        // bytes
  int64_t step;         // inputs
  int64_t steps;        // of all inputs, filled up with zeros
  int64_t group_steps;  // steps after which sums are scaled and added up in float; all of them if scaled at the end only
  int64_t groups;
  int64_t rows, blocks;
  int64_t chunk;  // steps

  int64_t tiles(int64_t block) const { return rows - block * BLOCK > TILE_ROWS ? 2 : 1; }
  int64_t step_bytes(int64_t block) const { return tiles(block) * TILE_ROWS * depth; }
  // Of a step, in bytes from the start of all activations.
  int64_t offset(int64_t block, int64_t at) const {
    int64_t first = at / chunk * chunk, of_chunk = steps - first < chunk ? steps - first : chunk;
    return (first * blocks + block * of_chunk) * BLOCK * depth + (at - first) * step_bytes(block);
  }
  int64_t scales_offset() const { return blocks * steps * BLOCK * depth; }
  int64_t counters_offset() const {
    return scales_offset() + (product == Product::int8 ? blocks * groups * BLOCK * 4 : 0);
  }
  int64_t bytes() const { return counters_offset() + blocks * COUNTER_BYTES; }
};

static inline Plan steps_of(const LinearArgs& args) {
  Plan plan;
  bool whole = args.format == Format::int8 || (args.format == Format::int4 && !args.wide);
  plan.product = whole ? Product::int8 : Product::bf16;
  // A group of an odd number of 32 bytes takes half-deep tiles, so that no product crosses its end.
  plan.depth = whole && args.format == Format::int4 && args.group % 64 ? 32 : 64;
  plan.step = whole ? plan.depth : plan.depth / 2;
  bool grouped = args.format == Format::int4 || (args.format == Format::fp8 && args.group < args.ins);
  plan.steps = round_up(args.ins, grouped ? args.group : plan.step) / plan.step;
  plan.group_steps = grouped ? args.group / plan.step : plan.steps;
  plan.groups = plan.steps / plan.group_steps;
  plan.rows = args.rows;
  plan.blocks = (args.rows + BLOCK - 1) / BLOCK;
  return plan;
}

}  // namespace
}  // namespace localllm::LANE
