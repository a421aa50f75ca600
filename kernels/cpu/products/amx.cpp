// Products with AMX tiles. Products of few rows, and types that tiles do not support (f32, f16), use the AVX-512
// kernels.

#include "../amx/activations.h"
#include "../amx/job.h"
#include "../amx/weights.h"

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
    case Format::fp8:
    case Format::mxfp4: return args.x_type == Type::bf16;
    default: return false;
  }
}

template <class Source>
void run_tasks(const LinearArgs& args, const Plan& plan, const Division& division, const Worker& worker) {
  Job<Source> job(args, plan, division, worker.scratch(Job<Source>::memory_bytes(plan, division)));
  configure_tiles(plan.depth);
  Tasks tasks((uint8_t*)args.shared + plan.counters_offset(), division, worker);
  for (Task task = tasks.next(), after; task.begin < task.end; task = after) {
    after = tasks.next();
    job.run(task, after);
  }
  tile_release();
}

}  // namespace

void linear(const LinearArgs& args, const Worker& worker) {
  if (!uses_tiles(args)) return avx512::linear(args, worker);
  Division division;
  Plan plan = plan_of(args, &division, worker.count);
  arrange(args, plan, worker);
  if (worker.index == 0) memset((uint8_t*)args.shared + plan.counters_offset(), 0, division.groups * COUNTER_BYTES);
  worker.barrier();
  switch (args.format) {
    case Format::bf16: return run_tasks<DenseWeights>(args, plan, division, worker);
    case Format::int8: return run_tasks<Int8Weights>(args, plan, division, worker);
    case Format::fp8: return run_tasks<Fp8Weights>(args, plan, division, worker);
    case Format::mxfp4: return run_tasks<Mxfp4Weights>(args, plan, division, worker);
    default:
      if (args.wide) return run_tasks<Int4Weights<Product::bf16>>(args, plan, division, worker);
      return run_tasks<Int4Weights<Product::int8>>(args, plan, division, worker);
  }
}

size_t linear_shared(const LinearArgs& args, int workers) {
  return uses_tiles(args) ? steps_of(args).bytes() : avx512::linear_shared(args, workers);
}

}  // namespace localllm::amx
