// Prefill attention bound by Hopper's tensor cores, after FlashAttention-3 (Shah et al., 2024).
//
// A tile has 128 rows: queries of one sequence times the query heads per kv head. It attends to 128 positions of the
// cache at a time, from the last to the first. A producer warp copies queries, keys and values to shared memory; two
// consumer warpgroups compute 64 tile rows each. The warpgroups alternate: one computes softmax while the other runs
// wgmma. Each starts the scores of the next positions before the weighted values of the current positions are complete.
//
// The kernel is persistent: thread blocks claim tiles with an atomic counter. Within a sequence, tiles with the longest
// context come first. The kv heads of a tile are adjacent in this order, so that the L2 cache serves their pages.
#include "prefill_tile.cuh"
#include "../device/overlap.cuh"
#include "../device/tensor_map.h"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "prefill_producer.cuh"
#include "prefill_consumer.cuh"
#endif

namespace localllm::cuda {
namespace {

// The kernel is empty on GPUs other than Hopper; no op starts it there.
template <class T, int DIM, bool CAP>
__global__ __launch_bounds__(THREADS, 1) void prefill_kernel(const __grid_constant__ Maps maps,
                                                            const __grid_constant__ PrefillArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<Shared<T, DIM>*>(memory + (-(int)hopper::address(memory) & (hopper::ATOM - 1)));
  int warpgroup = __shfl_sync(ALL, (int)threadIdx.x / GROUP, 0), thread = threadIdx.x % GROUP, lane = thread % 32;
  if (threadIdx.x == 0) {
    constexpr int WARPS = CONSUMER_THREADS / 32;
    for (int i = 0; i < 2; i++) {
      init(shared.query_full[i], 1);
      init(shared.query_empty[i], WARPS);
    }
    for (int i = 0; i < STAGES; i++) {
      init(shared.keys_full[i], 1);
      init(shared.keys_empty[i], WARPS);
      init(shared.values_full[i], 1);
      init(shared.values_empty[i], WARPS);
    }
    fence_barrier_init();
  }
  __syncthreads();
  launch_dependents();
  wait_for_previous();
  if (warpgroup == 2) {
    decrease_registers<40>();
    int unit = min(args.page_size, BLOCK);
    if (thread < 32) Producer<T, DIM>{args, maps, shared, lane, unit, BLOCK / unit}.run();
  } else {
    increase_registers<232>();
    Consumer<T, DIM, CAP>{args, shared, warpgroup, thread, lane}.run();
  }
#endif
}

template <int DIMS>
CUtensorMap map_of(Type type, const void* from, const cuuint64_t (&lengths)[DIMS],
                   const cuuint64_t (&strides)[DIMS - 1], const cuuint32_t (&box)[DIMS]) {
  const auto data = type == Type::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return tensor_map("prefill_attention", data, from, lengths, strides, box);
}

// The cache as groups of 8 slots: a copy from any number of pages then has the same layout in shared memory.
CUtensorMap cache_map(const PrefillArgs& args, const void* pages) {
  cuuint64_t slot = args.slot * 2, halves = args.dim / 64;
  cuuint32_t slot_groups = std::min(args.page_size, BLOCK) / 8;
  return map_of<5>(args.type, pages, {64, 8, halves, cuuint64_t(args.kv_heads), cuuint64_t(args.slots / 8)},
                   {slot, 128, cuuint64_t(args.head) * 2, slot * 8}, {64, 8, cuuint32_t(halves), 1, slot_groups});
}

CUtensorMap query_map(const PrefillArgs& args) {
  cuuint32_t group = args.group;
  return map_of<3>(args.type, args.query,
                   {cuuint64_t(args.dim), cuuint64_t(args.kv_heads) * group, cuuint64_t(args.tokens)},
                   {cuuint64_t(args.query_head) * 2, cuuint64_t(args.query_token) * 2}, {64, group, TILE_ROWS / group});
}

template <class T, int DIM, bool CAP>
void start(const Maps& maps, const PrefillArgs& args, cudaStream_t stream) {
  auto kernel = prefill_kernel<T, DIM, CAP>;
  constexpr int bytes = SHARED_BYTES<T, DIM>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  int64_t blocks = std::min<int64_t>(args.tiles * args.kv_heads, gpu().processors);
  launch_early(kernel, blocks, THREADS, bytes, stream, maps, args);
  check_launch("prefill_attention");
}

template <class T>
void start(const Maps& maps, const PrefillArgs& args, cudaStream_t stream) {
  bool cap = args.cap > 0.f;
  if (args.dim == 64) return cap ? start<T, 64, true>(maps, args, stream) : start<T, 64, false>(maps, args, stream);
  return cap ? start<T, 128, true>(maps, args, stream) : start<T, 128, false>(maps, args, stream);
}

}  // namespace

void prefill(const PrefillArgs& args, cudaStream_t stream) {
  Maps maps{query_map(args), cache_map(args, args.keys), cache_map(args, args.values)};
  args.type == Type::bf16 ? start<__nv_bfloat16>(maps, args, stream) : start<__half>(maps, args, stream);
}

}  // namespace localllm::cuda
