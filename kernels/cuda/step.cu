// All layers of a decode step of few rows, in one kernel: one block on each multiprocessor, of which one warp streams
// weights without a pause (step_ring.cuh) and eight multiply and attend. Blocks hand each other activations word by word
// (step_words.cuh): a layer takes five such exchanges, and nothing ends or begins in between.
//
//   stream, x -> norm -> [qkv] -> attention -> [out] -> stream, x -> norm -> [gate_up] -> [down] -> stream, x
//
// The idea of one kernel for a model's whole forward pass: Hazy Research's "No Bubbles" (2025), Mirage (Cheng et al.).
#include "step.h"

#include <stdexcept>

#include "step_attention.cuh"
#include "step_rows.cuh"

namespace localllm::cuda {
namespace {

template <int D>
__device__ inline void compute(const Block& b) {
  const StepArgs& a = b.a;
  const Places& places = b.places;
  uint32_t& last_turn = reinterpret_cast<uint32_t*>(a.shared)[blockIdx.x];
  Multiplier multiplier(b);
  Attention<D> attention(b);
  ask_norm(b, b.layer(0).norms[0]);
  await_previous();
  const uint32_t begun = last_turn;
  if (threadIdx.x < a.rows) b.at<int>(b.room.contexts)[threadIdx.x] = a.context_lens[threadIdx.x];
  for (int layer = 0; layer < a.layer_count; layer++) {
    const uint32_t turn = begun + layer + 1;
    const bool last = layer + 1 == a.layer_count;
    fill_normalised(b, layer == 0 ? nullptr : b.words(places.moved), turn - 1);
    multiplier.run(layer, QKV, {b.words(places.qkv), (a.heads + 2 * a.kv_heads) * D / 2, turn});
    attention.run(layer, turn);
    ask_norm(b, b.layer(layer).norms[1]);
    if (multiplier.takes_part(OUT)) fill(b, b.words(places.seen), a.heads * D, turn);
    multiplier.run(layer, OUT, {b.words(places.added), a.hidden / 2, turn});
    fill_normalised(b, b.words(places.added), turn);
    multiplier.run(layer, GATE_UP, {b.words(places.gated), a.inner / 2, turn});
    if (!last) ask_norm(b, b.layer(layer + 1).norms[0]);
    if (multiplier.takes_part(DOWN)) fill(b, b.words(places.gated), a.inner, turn);
    multiplier.run(layer, DOWN, {b.words(places.moved), a.hidden / 2, turn, last ? a.x_out : nullptr});
  }
  if (blockIdx.x == 0)
    for (int quad = threadIdx.x; quad < a.rows * a.hidden / 4; quad += TEAM)
      static_cast<uint2*>(a.stream_out)[quad] = b.at<uint2>(b.room.stream)[quad];
  if (threadIdx.x == 0) last_turn = begun + a.layer_count;
}

template <int D>
__global__ void __launch_bounds__(TEAM + 32, 1) step_kernel(const __grid_constant__ Plan plan) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000  // later ones were not tried, and some have too little shared memory
  extern __shared__ __align__(128) char memory[];
  let_next_begin();
  const Block b(plan, memory);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < b.room.stages; slot++) {
      hopper::init(b.full(slot), 1);
      hopper::init(b.empty(slot), CONSUMERS);
    }
    hopper::publish_barriers();
  }
  for (int i = threadIdx.x; i < b.a.layer_count * int(sizeof(StepLayer) / 16); i += TEAM + 32)
    b.at<uint4>(b.room.layers)[i] = reinterpret_cast<const uint4*>(b.a.layers)[i];
  __syncthreads();
  threadIdx.x < TEAM ? compute<D>(b) : fetch_weights(b);
#endif
}

Room room_of(const StepArgs& args) { return Room(args, gpu().shared_limit); }

// As many blocks as multiprocessors, but each has a part in the products that all of them make ready: what one still
// reads is not written anew.
int blocks_of(const StepArgs& args) {
  int tiles = std::min(product_of(args, QKV).tiles, product_of(args, GATE_UP).tiles);
  return std::min({tiles, gpu().processors, MOST_BLOCKS});
}

}  // namespace

int64_t step_shared(const StepArgs& args) { return Places(args).end * 8; }

bool step_fits(const StepArgs& args) {
#ifdef LOCALLLM_HOPPER
  return gpu().major == 9 && room_of(args).stages >= LEAST_STAGES;
#else
  return false;  // compiled for other GPUs only, the kernel is empty
#endif
}

void step(const StepArgs& args, cudaStream_t stream) {
  const Room room = room_of(args);
  auto kernel = args.dim == 64 ? step_kernel<64> : step_kernel<128>;
  const int shared = room.ring + room.stages * STAGE;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks_of(args))), config.blockDim = dim3(TEAM + 32);
  config.dynamicSmemBytes = shared, config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;  // blocks wait for each other: all are there, or none is
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes, config.numAttrs = 2;
  cudaLaunchKernelEx(&config, kernel, Plan{args, room, Places(args)});
  check_launch("decoder_step");
}

}  // namespace localllm::cuda
