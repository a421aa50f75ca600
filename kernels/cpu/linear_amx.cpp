// Products with AMX tiles. Products of few rows, and types that tiles do not support (f32, f16), use the AVX-512
// kernels.

#include "amx_activations.h"
#include "amx_product.h"
#include "amx_tasks.h"
#include "amx_weights.h"

namespace localllm::avx512 {
void linear(const LinearArgs& args, const Worker& worker);
size_t linear_shared(const LinearArgs& args, int workers);
}  // namespace localllm::avx512

namespace localllm::amx {

void linear(const LinearArgs& args, const Worker& worker);
size_t linear_shared(const LinearArgs& args, int workers);

namespace {

// The smallest number of rows for which tiles are faster than vectors; with fewer rows a tile is mostly empty. W4A8
// products need more rows, because with tiles they scale the sums in a separate pass for every group.
constexpr int64_t MIN_ROWS = 8;
constexpr int64_t MIN_ROWS_W4A8 = 24;

bool uses_tiles(const LinearArgs& args) {
  bool nibbles = args.format == Format::int4 && !args.wide;
  if (args.rows < (nibbles ? MIN_ROWS_W4A8 : MIN_ROWS)) return false;
  if (args.out_features == 0 || args.in_features == 0) return false;
  switch (args.format) {
    case Format::int8: return true;
    case Format::int4: return !args.wide || args.x_type == Type::bf16;
    case Format::bf16:
    case Format::fp8: return args.x_type == Type::bf16;
    default: return false;
  }
}

template <class Source>
class Job {
 public:
  Job(const LinearArgs& args, const Plan& plan, const Division& division, const Worker& worker)
      : args(args), plan(plan), division(division), worker(worker) {
    weights.panels = (const uint8_t*)args.weight;
    weights.panel_bytes = panel_bytes(args.format, args.in_features, args.group);
    weights.group = args.group;
    weights.plan = &plan;
  }

  void run() {
    int64_t sums_bytes = division.blocks * division.max_panels * SUMS * 4;
    int64_t scales_bytes = round_up((plan.groups == 1 ? 1 : plan.chunk / plan.group_steps) * PANEL * 4, 64);
    int64_t expanded_bytes = Source::expanded ? plan.chunk * plan.depth * PANEL : 0;
    uint8_t* scratch = (uint8_t*)worker.scratch(sums_bytes + 2 * SUMS * 4 + scales_bytes + expanded_bytes);
    sums = (float*)scratch;
    stage = (float*)(scratch + sums_bytes);
    scales = stage + 2 * SUMS;
    expanded_tiles = (uint8_t*)scales + scales_bytes;
    configure_tiles(plan.depth);
    Tasks tasks((uint8_t*)args.shared + plan.counters_offset(), division, worker);
    for (Task task = tasks.next(), after; task.begin < task.end; task = after) {
      after = tasks.next();
      run(task, after);
    }
    tile_release();
  }

 private:
  const LinearArgs& args;
  const Plan& plan;
  const Division& division;
  const Worker& worker;
  Source weights;
  float *sums, *stage, *scales;
  uint8_t* expanded_tiles;

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
          // With fewer than 4 blocks, memory bandwidth limits the product, and the hardware prefetch suffices.
          LinePrefetch prefetch{next + (block - top) * block_bytes,
                                bottom - top < 4 ? 0 : ceil_div(block_bytes, steps * 64)};
          if (plan.tiles(block) == 2)
            block_product<Source, 2>(plan, a, b, first, steps, row_scales(block), scales, block_sums, stage, prefetch);
          else
            block_product<Source, 1>(plan, a, b, first, steps, row_scales(block), scales, block_sums, stage, prefetch);
          if (!last) continue;
          if (plan.groups > 1 || args.format == Format::bf16)
            finish<Product::bf16>(args, block, panel, block_sums, nullptr, nullptr);
          else finish<Source::product>(args, block, panel, block_sums, row_scales(block), scales);
        }
      }
    }
  }

  const float* row_scales(int64_t block) const {
    if (plan.product != Product::int8) return nullptr;
    return (const float*)((const uint8_t*)args.shared + plan.scales_offset()) + block * plan.groups * BLOCK;
  }
};

}  // namespace

void linear(const LinearArgs& args, const Worker& worker) {
  if (!uses_tiles(args)) return avx512::linear(args, worker);
  Division division;
  Plan plan = plan_of(args, &division, worker.count);
  arrange(args, plan, worker);
  if (worker.index == 0) memset((uint8_t*)args.shared + plan.counters_offset(), 0, division.groups * COUNTER_BYTES);
  worker.barrier();
  switch (args.format) {
    case Format::bf16: return Job<DenseWeights>(args, plan, division, worker).run();
    case Format::int8: return Job<Int8Weights>(args, plan, division, worker).run();
    case Format::fp8: return Job<Fp8Weights>(args, plan, division, worker).run();
    default:
      if (args.wide) return Job<Int4Weights<Product::bf16>>(args, plan, division, worker).run();
      return Job<Int4Weights<Product::int8>>(args, plan, division, worker).run();
  }
}

size_t linear_shared(const LinearArgs& args, int workers) {
  return uses_tiles(args) ? steps_of(args).bytes() : avx512::linear_shared(args, workers);
}

}  // namespace localllm::amx
