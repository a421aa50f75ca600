// Division of a product into tile products, and the layout of its activations in shared memory.
//
//   step    the inputs of one tile product: `depth` bytes of activations
//   block   32 rows (two tiles); the last block may have one tile of 16 rows
//   chunk   the steps that a worker processes before it continues with the next panel
//
// Shared memory has three sections:
//   activations   [chunks][blocks][steps of the chunk][tiles][16 rows][depth]
//   scales        float [blocks][groups][32], only for int8 activations
//   counters      one cache line per block (tasks.h)
// The activations of a chunk are contiguous, because addresses that differ by powers of two share few cache sets.
#pragma once

#include "tiles.h"

namespace localllm::VARIANT {
namespace {  // so that member functions that are not inlined have internal linkage

constexpr int64_t BLOCK = 2 * TILE_ROWS;  // rows per block
constexpr int64_t COUNTER_BYTES = 64;  // one cache line per counter

struct Plan {
  Product product;
  int64_t depth;        // bytes of a tile row
  int64_t step;         // inputs per step
  int64_t steps;        // number of steps for all inputs, including padding
  int64_t group_steps;  // steps between two scalings of the sums: a quantisation group; without groups, all steps
  int64_t groups;
  int64_t rows, blocks;
  int64_t chunk;  // steps per chunk

  int64_t tiles(int64_t block) const { return rows - block * BLOCK > TILE_ROWS ? 2 : 1; }
  int64_t step_bytes(int64_t block) const { return tiles(block) * TILE_ROWS * depth; }
  // Offset in bytes of step `index` of a block in the activations.
  int64_t offset(int64_t block, int64_t index) const {
    int64_t first = index / chunk * chunk, chunk_steps = steps - first < chunk ? steps - first : chunk;
    return (first * blocks + block * chunk_steps) * BLOCK * depth + (index - first) * step_bytes(block);
  }
  int64_t scales_offset() const { return blocks * steps * BLOCK * depth; }
  int64_t counters_offset() const {
    return scales_offset() + (product == Product::int8 ? blocks * groups * BLOCK * 4 : 0);
  }
  int64_t bytes() const { return counters_offset() + blocks * COUNTER_BYTES; }
};

static inline Plan steps_of(const LinearArgs& args) {
  Plan plan;
  bool integer = args.format == Format::int8 || (args.format == Format::int4 && !args.wide);
  plan.product = integer ? Product::int8 : Product::bf16;
  // If the group is not a multiple of 64, tiles have half the depth, so that no product crosses the end of a group.
  plan.depth = integer && args.format == Format::int4 && args.group % 64 ? 32 : 64;
  plan.step = integer ? plan.depth : plan.depth / 2;
  bool grouped = args.format == Format::int4 || (args.format == Format::fp8 && args.group < args.in_features);
  plan.steps = round_up(args.in_features, grouped ? args.group : plan.step) / plan.step;
  plan.group_steps = grouped ? args.group / plan.step : plan.steps;
  plan.groups = plan.steps / plan.group_steps;
  plan.rows = args.rows;
  plan.blocks = (args.rows + BLOCK - 1) / BLOCK;
  return plan;
}

}  // namespace
}  // namespace localllm::VARIANT
