// Products of many rows by tiles; few rows, and what tiles do not multiply (f32 and f16), are the AVX-512 lane's.

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

// With fewer rows vectors are as fast, on a Xeon of 16 threads: a tile is then nearly empty. Full numbers times nibbles
// cost the vectors least, and the tiles a pass over the sums for every group.
constexpr int64_t FEWEST_ROWS = 8, FEWEST_ROWS_W4A8 = 24;

bool tiled(const LinearArgs& args) {
  bool nibbles = args.format == Format::int4 && !args.wide;
  if (args.rows < (nibbles ? FEWEST_ROWS_W4A8 : FEWEST_ROWS)) return false;
  if (args.outs == 0 || args.ins == 0) return false;
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
  Job(const LinearArgs& args, const Plan& plan, const Cut& cut, const Worker& worker)
      : args(args), plan(plan), cut(cut), worker(worker) {
    weights.panels = (const uint8_t*)args.weight;
    weights.panel_bytes = panel_bytes(args.format, args.ins, args.group);
    weights.group = args.group;
    weights.plan = &plan;
  }

  void run() {
    int64_t sums_bytes = cut.blocks * cut.most * SUMS * 4;
    int64_t scales_bytes = round_up((plan.groups == 1 ? 1 : plan.chunk / plan.group_steps) * PANEL * 4, 64);
    int64_t room_bytes = Source::expanded ? plan.chunk * plan.depth * PANEL : 0;
    uint8_t* scratch = (uint8_t*)worker.scratch(sums_bytes + 2 * SUMS * 4 + scales_bytes + room_bytes);
    sums = (float*)scratch;
    stage = (float*)(scratch + sums_bytes);
    scales = stage + 2 * SUMS;
    room = (uint8_t*)scales + scales_bytes;
    configure_tiles(plan.depth);
    Tasks tasks((uint8_t*)args.shared + plan.counters_offset(), cut, worker);
    for (Task task = tasks.next(), after; task.begin < task.end; task = after) {
      after = tasks.next();
      run(task, after);
    }
    tile_release();
  }

 private:
  const LinearArgs& args;
  const Plan& plan;
  const Cut& cut;
  const Worker& worker;
  Source weights;
  float *sums, *stage, *scales;
  uint8_t* room;

  void run(const Task& task, const Task& after) {
    int64_t top = task.group * cut.blocks, bottom = least(top + cut.blocks, plan.blocks);
    for (int64_t first = 0; first < plan.steps; first += plan.chunk) {
      int64_t steps = least(plan.chunk, plan.steps - first);
      bool last = first + steps == plan.steps;
      for (int64_t panel = task.begin; panel < task.end; panel++) {
        const uint8_t* packed = weights.panel(panel);
        const uint8_t* next = panel + 1 < task.end ? weights.at(weights.panel(panel + 1), first)
                              : last               ? weights.panel(after.begin)
                                                   : weights.at(weights.panel(task.begin), first + steps);
        int64_t bytes = weights.at(packed, first + steps) - weights.at(packed, first), each = bytes / (bottom - top);
        const uint8_t* b = weights.tiles(packed, first, steps, room);
        if (plan.groups == 1)
          weights.scales(packed, 0, scales);
        else
          for (int64_t i = 0; i < steps / plan.group_steps; i++)
            weights.scales(packed, first / plan.group_steps + i, scales + i * PANEL);
        for (int64_t block = top; block < bottom; block++) {
          const uint8_t* a = (const uint8_t*)args.shared + plan.offset(block, first);
          float* at = sums + ((block - top) * cut.most + panel - task.begin) * SUMS;
          // With fewer blocks a panel passes as fast as memory gives it, and the hardware fetches well enough.
          Ahead ahead{next + (block - top) * each, bottom - top < 4 ? 0 : pieces_of(each, steps * 64)};
          if (plan.tiles(block) == 2)
            block_product<Source, 2>(plan, a, b, first, steps, row_scales(block), scales, at, stage, ahead);
          else
            block_product<Source, 1>(plan, a, b, first, steps, row_scales(block), scales, at, stage, ahead);
          if (!last) continue;
          if (plan.groups > 1 || args.format == Format::bf16)
            finish<Product::bf16>(args, block, panel, at, nullptr, nullptr);
          else
            finish<Source::product>(args, block, panel, at, row_scales(block), scales);
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
  if (!tiled(args)) return avx512::linear(args, worker);
  Cut cut;
  Plan plan = plan_of(args, &cut, worker.count);
  arrange(args, plan, worker);
  if (worker.index == 0) memset((uint8_t*)args.shared + plan.counters_offset(), 0, cut.groups * COUNTER_BYTES);
  worker.barrier();
  switch (args.format) {
    case Format::bf16: return Job<DenseWeights>(args, plan, cut, worker).run();
    case Format::int8: return Job<Int8Weights>(args, plan, cut, worker).run();
    case Format::fp8: return Job<Fp8Weights>(args, plan, cut, worker).run();
    default:
      if (args.wide) return Job<Int4Weights<Product::bf16>>(args, plan, cut, worker).run();
      return Job<Int4Weights<Product::int8>>(args, plan, cut, worker).run();
  }
}

size_t linear_shared(const LinearArgs& args, int workers) {
  return tiled(args) ? steps_of(args).bytes() : avx512::linear_shared(args, workers);
}

}  // namespace localllm::amx
