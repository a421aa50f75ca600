// Experts with AMX tiles. Segments of few rows, and types that tiles do not support (f32, f16), use the AVX-512 kernels.

#include "../amx/activations.h"
#include "../amx/job.h"
#include "../amx/weights.h"
#include "experts.h"
#include "../products/rows.h"

namespace localllm::avx512 {
void experts(const ExpertsArgs& args, const Worker& worker);
size_t experts_shared(const ExpertsArgs& args);
}  // namespace localllm::avx512

namespace localllm::amx {

void experts(const ExpertsArgs& args, const Worker& worker);
size_t experts_shared(const ExpertsArgs& args);

namespace {

// The smallest average number of rows of a tile for which tiles are faster than vectors.
constexpr int64_t MIN_ROWS = 4;

bool uses_tiles(const ExpertsArgs& args) {
  if (args.plan.rows < MIN_ROWS * args.plan.tiles) return false;
  switch (args.format) {
    case Format::int8: return true;
    case Format::int4: return !args.wide || args.type == Type::bf16;
    case Format::bf16:
    case Format::fp8:
    case Format::mxfp4: return args.type == Type::bf16;
    default: return false;
  }
}

// A prepared row of int8 activations: int8 [steps * depth], then a scale for each group.
template <class Source>
class TileRows {
 public:
  static int64_t row_bytes(const LinearArgs& product) {
    if constexpr (Source::product == Product::bf16) return 0;
    Plan plan = steps_of(product);
    return round_up(plan.steps * plan.depth + plan.groups * 4, 64);
  }

  static void prepare(const LinearArgs& product, int64_t row, uint8_t* to) {
    Plan plan = steps_of(product);
    float* scales = (float*)(to + plan.steps * plan.depth);
    int64_t width = plan.group_steps * plan.step;
    for (int64_t group = 0; group < plan.groups; group++) {
      int64_t first = group * width, count = min_of(width, product.in_features - first);
      auto address = [&](int64_t step) { return (int8_t*)to + first + step * plan.depth; };
      as_stored(product.x_type, product.x, [&](auto* x) {
        scales[group] = quantise_group(x + row * product.x_stride + first, count, plan, address);
      });
    }
  }

  static int64_t memory_bytes(LinearArgs product, int64_t rows) {
    product.rows = rows;
    Plan plan = steps_of(product);
    // The chunk of a segment with fewer blocks may be longer.
    plan.chunk = chunk_of(plan, 1);
    return round_up(plan.bytes(), 64) + Job<Source>::memory_bytes(plan, division_of(plan));
  }

  explicit TileRows(const LinearArgs& product) { configure_tiles(steps_of(product).depth); }
  static void end() { tile_release(); }

  void arrange(const LinearArgs& segment, void* memory) {
    plan = steps_of(segment);
    plan.chunk = chunk_of(plan, plan.blocks);
    activations = (uint8_t*)memory;
    job_memory = activations + round_up(plan.bytes(), 64);
    for (int64_t row = 0; row < round_up(segment.rows, TILE_ROWS); row++) copy_row(segment, row);
  }

  void multiply(LinearArgs panel, const void* next) const {
    int64_t bytes = panel_bytes(panel.format, panel.in_features, panel.group);
    int64_t after = ((const char*)next - (const char*)panel.weight) / bytes;
    panel.shared = activations;
    Division division = division_of(plan);
    Job<Source>(panel, plan, division, job_memory).run({0, 0, 1}, {0, after, after + 1});
  }

 private:
  Plan plan{};
  uint8_t *activations = nullptr, *job_memory = nullptr;

  // One task of all blocks and one panel. Few blocks read the weights faster than memory delivers them, so the products
  // of the blocks prefetch the next weights.
  static Division division_of(const Plan& plan) { return {plan.blocks, 1, 1, 1, true}; }

  // Copies a row to the tile layout. Padding rows are zero.
  void copy_row(const LinearArgs& segment, int64_t row) {
    int64_t offset = row % BLOCK * plan.depth;
    if constexpr (Source::product == Product::bf16) {
      LinearArgs one = segment;
      one.shared = activations;
      return VARIANT::copy_row(row < segment.rows ? row_of<bf16>(segment, row) : nullptr, row, one, plan);
    }
    float* scales = (float*)(activations + plan.scales_offset()) + row / BLOCK * plan.groups * BLOCK + row % BLOCK;
    const uint8_t* from = row < segment.rows ? row_of<uint8_t>(segment, row) : nullptr;
    for (int64_t step = 0; step < plan.steps; step++) {
      uint8_t* to = activations + plan.offset(row / BLOCK, step) + offset;
      if (from) memcpy(to, from + step * plan.depth, plan.depth);
      else memset(to, 0, plan.depth);
    }
    const float* row_scales = from ? (const float*)(from + plan.steps * plan.depth) : nullptr;
    for (int64_t group = 0; group < plan.groups; group++) scales[group * BLOCK] = from ? row_scales[group] : 0.0f;
  }
};

// Calls f with a null pointer to the class of amx/weights.h for the weights.
template <class F>
void with_source(const ExpertsArgs& args, F f) {
  switch (args.format) {
    case Format::bf16: return f((DenseWeights*)nullptr);
    case Format::int8: return f((Int8Weights*)nullptr);
    case Format::fp8: return f((Fp8Weights*)nullptr);
    case Format::mxfp4: return f((Mxfp4Weights*)nullptr);
    default:
      if (args.wide) return f((Int4Weights<Product::bf16>*)nullptr);
      return f((Int4Weights<Product::int8>*)nullptr);
  }
}

}  // namespace

void experts(const ExpertsArgs& args, const Worker& worker) {
  if (!uses_tiles(args)) return avx512::experts(args, worker);
  with_source(args, [&]<class Source>(Source*) { run_experts<TileRows<Source>>(args, worker); });
}

size_t experts_shared(const ExpertsArgs& args) {
  if (!uses_tiles(args)) return avx512::experts_shared(args);
  size_t bytes = 0;
  with_source(args, [&]<class Source>(Source*) { bytes = shared_bytes<TileRows<Source>>(args); });
  return bytes;
}

}  // namespace localllm::amx
