// All layers of a decode step of one row in one persistent kernel, with one thread block per multiprocessor. In each
// block one producer warp streams weights (ring.cuh), two producer warps fetch keys and values (unit.cuh),
// and eight consumer warps compute products and attention. Blocks exchange activations as tagged words
// (words.cuh), five times per layer, without grid barriers.
//
//   stream, x -> norm -> [qkv] -> attention -> [out] -> stream, x -> norm -> [gate_up] -> [down] -> stream, x
//
// Prior work on one kernel per forward pass: "No Bubbles" (Hazy Research, 2025), Mirage (Cheng et al.).
#include "step.h"

#include <stdexcept>

#include "attention.cuh"
#include "rows.cuh"

namespace localllm::cuda {
namespace {

// The consumer warps. Loops are not unrolled: each layer executes this code once, and long code would be evicted from
// the instruction cache between layers.
template <int D>
__device__ inline void compute(const Block& b) {
  const StepArgs& a = b.a;
  uint32_t& last_epoch = reinterpret_cast<uint32_t*>(a.shared)[blockIdx.x];
  prefetch_norm(b, b.layer(0).norms[0]);
  wait_for_previous();
  uint32_t epoch = last_epoch;
  Multiplier multiplier(b);
  const Attention<D> attention(b);
  load_inputs(b);
#pragma unroll 1
  for (int index = 0; index < 4 * a.layer_count; index++) {
    const int layer = index / 4, phase = index % 4;
    const Product& product = b.plan.products[phase];
    const bool normalised = phase == QKV || phase == GATE_UP;
    if (index > 0 && (normalised || multiplier.has_tiles(product)))
      read_activations(b, phase, b.nearest_words(product.from), product.in_features, epoch);
    if (phase == QKV && ++epoch == 0) epoch = 1;  // epoch 0 marks words that were never written
    if (normalised) normalise(b);
    sync_consumers();
    if (normalised && index + 2 < 4 * a.layer_count) prefetch_norm(b, b.layer((index + 2) / 4).norms[phase == QKV]);
    multiplier.run(layer, phase, epoch);
    if (phase == QKV) attention.run(layer, epoch);
  }
  if (blockIdx.x == 0)
    for (int quad = threadIdx.x; quad < a.hidden / 4; quad += CONSUMER_THREADS)
      static_cast<uint2*>(a.stream_out)[quad] = b.pointer<uint2>(b.plan.stream)[quad];
  if (threadIdx.x == 0) last_epoch = epoch;
}

template <int D>
__global__ void __launch_bounds__(CONSUMER_THREADS + PRODUCER_THREADS, 1)
    step_kernel(const __grid_constant__ Plan plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // not tested on later GPUs; some have too little shared memory
  launch_dependents();
  const Block b(plan);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < b.plan.stages; slot++) {
      hopper::init(b.full(slot), hopper::ARRIVALS);
      hopper::init(b.empty(slot), hopper::ARRIVALS);
    }
    hopper::init(b.cache_full(), 2 * hopper::ARRIVALS);
    hopper::init(b.cache_empty(), CONSUMERS * hopper::ARRIVALS);
    hopper::fence_barrier_init();
  }
  for (int i = threadIdx.x; i < b.a.layer_count * int(sizeof(StepLayer) / 16); i += CONSUMER_THREADS + PRODUCER_THREADS)
    b.pointer<uint4>(b.plan.layers)[i] = reinterpret_cast<const uint4*>(b.a.layers)[i];
  __syncthreads();
  if (threadIdx.x < CONSUMER_THREADS) {
    hopper::increase_registers<224>();  // attention needs this number of registers
    compute<D>(b);
  } else {
    hopper::decrease_registers<56>();
    const int producer = threadIdx.x / 32 - CONSUMERS;
    if (producer == 0) fetch_weights(b);
    else if (producer < 3) fetch_cache<D>(b, producer == 2);
  }
#endif
}

// One block per multiprocessor, but not more than tiles of the qkv and gate_up products: every block must have a tile
// of these, else a block could overwrite words that a slower block still reads.
Plan plan_of(const StepArgs& args) {
  const int tiles = std::min(args.inner / 4, (args.heads + 2 * args.kv_heads) * args.dim / 8);
  return Plan(args, std::min({tiles, gpu().processors, MAX_BLOCKS}), gpu().shared_limit);
}

}  // namespace

int64_t step_shared(const StepArgs& args) { return plan_of(args).end * 8; }

bool step_fits(const StepArgs& args) {
#ifdef LOCALLLM_HOPPER
  const Plan plan = plan_of(args);
  return gpu().major == 9 && plan.stages > 1 && args.kv_heads <= plan.blocks;
#else
  return false;  // not built for Hopper: the kernel is empty
#endif
}

void step(const StepArgs& args, cudaStream_t stream) {
  const Plan plan = plan_of(args);
  auto kernel = args.dim == 64 ? step_kernel<64> : step_kernel<128>;
  const int shared = plan.ring + plan.stages * STAGE;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(plan.blocks));
  config.blockDim = dim3(CONSUMER_THREADS + PRODUCER_THREADS);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;  // blocks wait for each other, so all must be resident
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  cudaLaunchKernelEx(&config, kernel, plan);
  check_launch("decoder_step");
}

}  // namespace localllm::cuda
