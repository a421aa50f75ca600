// Prefill attention with mma.sync, after FlashAttention-2 (Dao, 2023): for GPUs from compute capability 8.0 on, and on
// Hopper for what prefill.cu does not support.
//
// A thread block computes a tile: queries of one sequence times the query heads per kv head, one row each. It attends to
// BLOCK positions of the cache at a time, from the last to the first. Copies run while the warps compute: those of
// the values during the scores, those of the next keys during softmax and weighted values. Copies of an fp8 cache run
// during a whole iteration; the warps then convert them.
#include "prefill_mma_consumer.cuh"

namespace localllm::cuda {
namespace {

template <class S, class T, class C>
__device__ void attend(const PrefillArgs& args, Shared<S, C>& shared) {
  constexpr bool WIDENED = Shared<S, C>::WIDENED;
  const Tile copy = shared.tile;
  const Tile& tile = WIDENED && S::MATRICES > 1 ? shared.tile : copy;  // the copy would not fit into the registers
  const Loader<S, C> loader{args, shared, tile};
  Consumer<S, T, C> consumer{args, shared, tile};
  int block = (tile.end - 1) / S::BLOCK;
  auto slots = loader.slots_of(block);
  consumer.load_query();
  loader.template start<KEYS>(slots);
  if constexpr (WIDENED) {
    loader.template start<VALUES>(slots);
    slots = loader.slots_of(block - 1);
  }
  consumer.start();
  for (; block >= tile.low / S::BLOCK; block--) {
    wait_copies();
    __syncthreads();
    if constexpr (WIDENED) {
      loader.template widen<KEYS>();
      loader.template widen<VALUES>();
      loader.template start<KEYS>(slots);
      loader.template start<VALUES>(slots);
      slots = loader.slots_of(block - 2);
      __syncthreads();
      consumer.multiply_keys();
    } else {
      loader.template start<VALUES>(slots);
      slots = loader.slots_of(block - 1);
      consumer.multiply_keys();
      wait_copies();
      __syncthreads();
      loader.template start<KEYS>(slots);
    }
    if (args.cap > 0.f) consumer.cap_scores();
    const bool causal = (block + 1) * S::BLOCK > tile.before + 1;
    const bool windowed = args.window > 0 && block * S::BLOCK <= tile.end - 1 - args.window;
    if (causal || windowed) consumer.mask(block);
    consumer.softmax();
    consumer.multiply_values();
  }
  wait_copies();
  consumer.finish();
}

template <class S, class T, class C>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT)
    prefill_mma_kernel(const __grid_constant__ PrefillArgs args) {
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<Shared<S, C>*>(memory);
  launch_dependents();
  wait_for_previous();
  const int kv_head = blockIdx.x % args.kv_heads, target = blockIdx.x / args.kv_heads;
  const Tile tile = find_tile(args, kv_head, target, S::ROWS / args.group, threadIdx.x % 32);
  if (tile.count == 0) return;
  if (threadIdx.x == 0) shared.tile = tile;
  __syncthreads();
  attend<S, T>(args, shared);
}

template <class S, class T, class C>
void start(const PrefillArgs& args, cudaStream_t stream) {
  auto kernel = prefill_mma_kernel<S, T, C>;
  constexpr int bytes = sizeof(Shared<S, C>);
  static_assert(bytes <= 99 << 10, "the kernel does not fit into the shared memory of a GeForce GPU");
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  launch_early(kernel, args.tiles * args.kv_heads, S::THREADS, bytes, stream, args);
  check_launch("prefill_attention_mma");
}

template <class S>
void start(const PrefillArgs& args, cudaStream_t stream) {
  auto with = [&](auto zero) {
    using T = decltype(zero);
    args.e4m3 ? start<S, T, __nv_fp8_e4m3>(args, stream) : start<S, T, T>(args, stream);
  };
  args.type == Type::bf16 ? with(__nv_bfloat16{}) : with(__half{});
}

}  // namespace

// Two blocks of every tiling fit into the 100 KB of shared memory of a multiprocessor of GeForce GPUs, except for head
// size 256 and for some fp8 caches.
void prefill_mma(const PrefillArgs& args, int tile_rows, cudaStream_t stream) {
  const bool large = tile_rows == MMA_LARGE_TILE;
  switch (args.dim) {
    case 64: return large ? start<Tiling<64, 64, 4, 2, 2>>(args, stream) : start<Tiling<64, 64, 4, 1, 3>>(args, stream);
    case 80: return large ? start<Tiling<80, 64, 4, 2, 2>>(args, stream) : start<Tiling<80, 64, 4, 1, 2>>(args, stream);
    case 96: return large ? start<Tiling<96, 64, 4, 2, 2>>(args, stream) : start<Tiling<96, 64, 4, 1, 2>>(args, stream);
    case 128:
      return large ? start<Tiling<128, 32, 4, 2, 2>>(args, stream) : start<Tiling<128, 64, 4, 1, 2>>(args, stream);
    case 192: return start<Tiling<192, 32, 4, 1, 2>>(args, stream);
    case 256: return start<Tiling<256, 32, 4, 1, 2>>(args, stream);
  }
}

}  // namespace localllm::cuda
