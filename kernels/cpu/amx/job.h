// The tile products of one task: a group of row blocks × some panels, for all inputs.
#pragma once

#include "product.h"
#include "tasks.h"

namespace localllm::VARIANT {
namespace {

// Source: a class of weights.h. args.shared has the activations in the layout of plan.h.
template <class Source>
class Job {
 public:
  static int64_t memory_bytes(const Plan& plan, const Division& division) {
    int64_t expanded_bytes = Source::expanded ? plan.chunk * plan.depth * PANEL : 0;
    return sums_bytes(division) + 2 * SUMS * 4 + scales_bytes(plan) + expanded_bytes;
  }

  // `memory`: memory_bytes() bytes, 64-byte aligned, that only this worker uses.
  Job(const LinearArgs& args, const Plan& plan, const Division& division, void* memory)
      : args(args), plan(plan), division(division) {
    weights.panels = (const uint8_t*)args.weight;
    weights.panel_bytes = panel_bytes(args.format, args.in_features, args.group);
    weights.group = args.group;
    weights.plan = &plan;
    sums = (float*)memory;
    stage = (float*)((uint8_t*)memory + sums_bytes(division));
    scales = stage + 2 * SUMS;
    expanded_tiles = (uint8_t*)scales + scales_bytes(plan);
  }

  // Computes a task; the tiles are configured for plan.depth. The job prefetches the first weights of the task `after`.
  void run(const Task& task, const Task& after) {
    int64_t top = task.group * division.blocks, bottom = min_of(top + division.blocks, plan.blocks);
    for (int64_t first = 0; first < plan.steps; first += plan.chunk) {
      int64_t steps = min_of(plan.chunk, plan.steps - first);
      bool last = first + steps == plan.steps;
      for (int64_t panel = task.begin; panel < task.end; panel++) {
        const uint8_t* packed = weights.panel(panel);
        const uint8_t* next = panel + 1 < task.end ? weights.step_data(weights.panel(panel + 1), first)
                              : last               ? weights.panel(after.begin)
                                                   : weights.step_data(weights.panel(task.begin), first + steps);
        int64_t bytes = weights.step_data(packed, first + steps) - weights.step_data(packed, first);
        int64_t block_bytes = bytes / (bottom - top);
        const uint8_t* b = weights.tiles(packed, first, steps, expanded_tiles);
        if (plan.groups == 1)
          weights.scales(packed, 0, scales);
        else
          for (int64_t i = 0; i < steps / plan.group_steps; i++)
            weights.scales(packed, first / plan.group_steps + i, scales + i * PANEL);
        for (int64_t block = top; block < bottom; block++) {
          const uint8_t* a = (const uint8_t*)args.shared + plan.offset(block, first);
          float* block_sums = sums + ((block - top) * division.max_panels + panel - task.begin) * SUMS;
          LinePrefetch prefetch{next + (block - top) * block_bytes,
                                division.prefetches ? ceil_div(block_bytes, steps * 64) : 0};
          if (plan.tiles(block) == 2)
            block_product<Source, 2>(plan, a, b, first, steps, row_scales(block), scales, block_sums, stage, prefetch);
          else
            block_product<Source, 1>(plan, a, b, first, steps, row_scales(block), scales, block_sums, stage, prefetch);
          if (!last) continue;
          if (plan.groups > 1 || args.format == Format::bf16 || args.format == Format::mxfp4)
            finish<Product::bf16>(args, block, panel, block_sums, nullptr, nullptr);
          else finish<Source::product>(args, block, panel, block_sums, row_scales(block), scales);
        }
      }
    }
  }

 private:
  const LinearArgs& args;
  const Plan& plan;
  const Division& division;
  Source weights;
  float *sums, *stage, *scales;
  uint8_t* expanded_tiles;

  static int64_t sums_bytes(const Division& division) { return division.blocks * division.max_panels * SUMS * 4; }
  static int64_t scales_bytes(const Plan& plan) {
    return round_up((plan.groups == 1 ? 1 : plan.chunk / plan.group_steps) * PANEL * 4, 64);
  }
  const float* row_scales(int64_t block) const {
    if (plan.product != Product::int8) return nullptr;
    return (const float*)((const uint8_t*)args.shared + plan.scales_offset()) + block * plan.groups * BLOCK;
  }
};

}  // namespace
}  // namespace localllm::VARIANT
