// Products of many rows by tiles; few rows, and what tiles do not multiply (f32 and f16), are the AVX-512 lane's.

#include "amx_activations.h"
#include "amx_product.h"
#include "amx_weights.h"

namespace localllm::avx512 {
void linear(const LinearArgs& args, const Worker& worker);
size_t linear_shared(const LinearArgs& args, int workers);
}  // namespace localllm::avx512

namespace localllm::amx {

void linear(const LinearArgs& args, const Worker& worker);
size_t linear_shared(const LinearArgs& args, int workers);

namespace {

// Fewer rows than this leave so much of a tile empty that vectors are faster (measured; see the note in the report).
constexpr int64_t FEWEST_ROWS = 8;

bool tiled(const LinearArgs& args) {
  if (args.rows < FEWEST_ROWS || args.outs == 0 || args.ins == 0) return false;
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
  Job(const LinearArgs& args, const Plan& plan, const Worker& worker) : args(args), plan(plan), worker(worker) {
    weights.panels = (const uint8_t*)args.weight;
    weights.panel_bytes = panel_bytes(args.format, args.ins, args.group);
    weights.group = args.group;
    weights.plan = &plan;
  }

  void run() {
    Rectangle own = rectangle_of(plan.blocks, round_up(args.outs, PANEL) / PANEL, worker);
    int64_t blocks = own.blocks.end - own.blocks.begin, panels = own.panels.end - own.panels.begin;
    if (blocks == 0 || panels == 0) return;
    chunk = chunk_of(blocks);
    int64_t high = cut(blocks, BLOCKS), wide = cut(panels, PANELS);
    int64_t sums_bytes = high * wide * SUMS * 4, scales_bytes = round_up(chunk_groups() * PANEL * 4, 64);
    uint8_t* scratch =
        (uint8_t*)worker.scratch(sums_bytes + 2 * SUMS * 4 + scales_bytes + chunk * plan.depth * PANEL);
    sums = (float*)scratch;
    stage = (float*)(scratch + sums_bytes);
    scales = stage + 2 * SUMS;
    room = (uint8_t*)scales + scales_bytes;
    configure_tiles(plan.depth);
    for (int64_t block = own.blocks.begin; block < own.blocks.end; block += high)
      for (int64_t panel = own.panels.begin; panel < own.panels.end; panel += wide)
        part({block, least(block + high, own.blocks.end)}, {panel, least(panel + wide, own.panels.end)});
    tile_release();
  }

 private:
  const LinearArgs& args;
  const Plan& plan;
  const Worker& worker;
  Source weights;
  int64_t chunk;  // steps
  float *sums, *stage, *scales;
  uint8_t* room;

  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  static int64_t cut(int64_t count, int64_t most) {  // into equal pieces of at most `most`
    int64_t pieces = (count + most - 1) / most;
    return (count + pieces - 1) / pieces;
  }
  int64_t chunk_groups() const { return plan.groups == 1 ? 1 : chunk / plan.group_steps; }

  // All inputs at once when few rows pass a panel anyway and it need not be expanded: it is then read front to back.
  int64_t chunk_of(int64_t blocks) const {
    if (!Source::expanded && blocks <= 2) return plan.steps;
    if (plan.groups == 1) return least(CHUNK, plan.steps);
    return least(CHUNK > plan.group_steps ? CHUNK / plan.group_steps * plan.group_steps : plan.group_steps, plan.steps);
  }

  // Every chunk of the inputs for some blocks and panels.
  void part(Share blocks, Share panels) {
    for (int64_t first = 0; first < plan.steps; first += chunk) {
      int64_t steps = least(chunk, plan.steps - first);
      bool last = first + steps == plan.steps;
      for (int64_t panel = panels.begin; panel < panels.end; panel++) {
        const uint8_t* packed = weights.panel(panel);
        const uint8_t* b = weights.tiles(packed, first, steps, room);
        if (plan.groups > 1)
          for (int64_t group = 0; group < steps / plan.group_steps; group++)
            weights.scales(packed, first / plan.group_steps + group, scales + group * PANEL);
        else if (last)
          weights.scales(packed, 0, scales);
        // While this chunk is multiplied the next panel's is fetched, and the next chunk of the activations.
        bool turn = panel + 1 == panels.end;
        const uint8_t* next = turn ? weights.at(weights.panel(panels.begin), last ? 0 : first + steps)
                                   : weights.at(weights.panel(panel + 1), first);
        int64_t next_bytes = weights.at(packed, first + steps) - weights.at(packed, first);
        for (int64_t block = blocks.begin; block < blocks.end; block++) {
          const uint8_t* a = (const uint8_t*)args.shared + block * plan.block_bytes();
          int64_t a_chunk = steps * plan.step_bytes(block);
          Ahead soon = ahead_of(next, next_bytes, block - blocks.begin, blocks.end - blocks.begin, steps);
          Ahead later = ahead_of(a + (first + steps) * plan.step_bytes(block), last ? 0 : a_chunk,
                                 panel - panels.begin, panels.end - panels.begin, steps);
          float* at = sums + ((block - blocks.begin) * (panels.end - panels.begin) + panel - panels.begin) * SUMS;
          if (plan.tiles(block) == 2)
            block_product<Source, 2>(plan, a, b, first, steps, row_scales(block), scales, at, stage, soon, later);
          else
            block_product<Source, 1>(plan, a, b, first, steps, row_scales(block), scales, at, stage, soon, later);
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
  Plan plan = plan_of(args);
  arrange(args, plan, worker);
  worker.barrier();
  switch (args.format) {
    case Format::bf16: return Job<DenseWeights>(args, plan, worker).run();
    case Format::int8: return Job<Int8Weights>(args, plan, worker).run();
    case Format::fp8: return Job<Fp8Weights>(args, plan, worker).run();
    default:
      if (args.wide) return Job<Int4Weights<Product::bf16>>(args, plan, worker).run();
      return Job<Int4Weights<Product::int8>>(args, plan, worker).run();
  }
}

size_t linear_shared(const LinearArgs& args, int workers) {
  return tiled(args) ? plan_of(args).bytes() : avx512::linear_shared(args, workers);
}

}  // namespace localllm::amx
