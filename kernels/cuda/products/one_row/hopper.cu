// Products of one row with int4 weights on Hopper: int8 dot products (dp4a), with weights from a ring buffer in shared
// memory. one_row.cu computes all other products of one row.
//
// A tile is 8 outputs and all inputs. A producer warp copies tiles to the ring by cp.async.bulk. It fills the ring
// before the previous kernel has ended. When all but a few stages have been requested, it lets the next kernel start,
// which then fills its ring. With gates, tiles of gates alternate with tiles of the values that they multiply.
//
// A stage has SEGMENT bytes of each output of a tile. A team of four warps computes a tile. A lane multiplies chunks of
// 64 bytes of one output:
//
//   lane = 8 c + o      output o of 8; chunks 16 i + 4 w + c of warp w of the team, i = 0, 1, …
//
// These are the chunks of warp 4 w + c in small_batch/kernel.cuh, and their sums are added in the same order. Sums of
// integers are exact in any order. So the result of a row has the same bits in every batch.
#include "hopper_ring.cuh"

namespace localllm::cuda {
namespace {

#ifdef LOCALLLM_HOPPER
constexpr bool COMPILED = true;
#else
constexpr bool COMPILED = false;  // not built for Hopper: the kernel is empty
#endif

// Stores the output that one thread reduces in a group of TILES tiles; with gates, of a gate and the value that it
// multiplies.
__device__ inline void finish_output(const Block& b, int first, const float* sums) {
  const int group_tile = int(threadIdx.x) / 8 * (b.a.gated ? 2 : 1), tile = first + group_tile;
  const int output = b.output_block_of(tile) * 8 + int(threadIdx.x) % 8;
  if (tile >= min(first + TILES, b.tiles()) || output >= b.outputs()) return;
  auto value = [&](int i) {
    const float* from = sums + (group_tile + i) * SUMS + threadIdx.x % 8;
    float sum = 0;
#pragma unroll 8
    for (int c = 0; c < CHUNKS; c++) sum += from[c * 8];
    return sum + (b.a.bias ? number(b.a.bias, b.a.bias_type, output + i * b.outputs()) : 0.0f);
  };
  float result = b.a.gated ? activated(Activation(b.a.gate), rounded(value(0))) * rounded(value(1)) : value(0);
  put(b.a.out, b.a.out_type, output, result);
}

// Stores the outputs of the tiles from `first` on. Returns true after the block's last tiles.
[[maybe_unused]] __device__ inline bool finish(const Block& b, int first, const float* sums) {
  sync_consumers();
  finish_output(b, first, sums);
  if (first + TILES >= b.tiles()) return true;
  sync_consumers();
  return false;
}

// N: vectors of activations per thread (see OneRow).
template <class F, int N>
__device__ inline void multiply(const Block& b) {
  const Layout& layout = b.layout;
  const int tiles = b.tiles();
  OneRow<F, N> activations(b.a, b.memory + layout.x, layout.chunks * F::CHUNK);
  wait_for_previous();
  activations.fill();

  const int team = threadIdx.x / (TEAM_WARPS * 32), lane = threadIdx.x % 32;
  const int own_chunk = threadIdx.x / 32 % TEAM_WARPS * 4 + lane / 8, output = lane % 8;
  auto* sums = reinterpret_cast<float*>(b.memory + layout.sums);
  const uint32_t x = hopper::address(activations.x), groups = hopper::address(activations.groups);
  const uint32_t ring = hopper::address(b.memory + layout.ring);
  RingPosition position{0, layout.stages};
  position.advance(team);
  for (int first = 0;; first += TILES) {
    for (int tile = first + team; tile < min(first + TILES, tiles); tile += TEAMS) {
      const int active_teams = min(TEAMS, tiles - (tile - team));
      float sum = 0;
      for (int segment = 0; segment < layout.segments; segment++) {
        position.wait_barrier(b, team);
        const uint32_t stage = ring + position.slot * layout.stage;
#pragma unroll
        for (int within = own_chunk; within < SEGMENT / 64; within += CHUNKS) {
          int chunk = segment * (SEGMENT / 64) + within;
          if (chunk >= layout.chunks) continue;
          F::multiply(sum,
                      {stage + output * PITCH + within * 64, x + chunk * F::CHUNK,
                       stage + 8 * PITCH + (within * F::GROUPS * 8 + output) * 4,
                       groups + chunk * F::GROUPS * int(sizeof(Rounded)), layout.subgroups - 1 - chunk * F::GROUPS});
        }
        hopper::release_stage(b.empty(position.slot));
        position.advance(active_teams);
      }
      sums[(tile - first) * SUMS + own_chunk * 8 + output] = sum;
    }
    if (finish(b, first, sums)) return;
  }
}

template <class F>
__global__ void __launch_bounds__(CONSUMER_THREADS + 32, 2)
    one_row_hopper_kernel(const __grid_constant__ ProductArgs args, const __grid_constant__ Layout layout) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // not tested on later GPUs
  extern __shared__ __align__(128) char memory[];
  const Block b{args, layout, memory};
  if (threadIdx.x == CONSUMER_THREADS) {
    for (int slot = 0; slot < layout.stages; slot++) {
      for (int team = 0; team < TEAMS; team++) hopper::init(b.full(team, slot), hopper::ARRIVALS);
      hopper::init(b.empty(slot), TEAM_WARPS * hopper::ARRIVALS);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMER_THREADS) return fetch<F>(b);
  const int vectors = layout.chunks * (F::CHUNK / 8);
  if (vectors <= CONSUMER_THREADS) return multiply<F, 1>(b);
  if (vectors <= 2 * CONSUMER_THREADS) return multiply<F, 2>(b);
  if (vectors <= 4 * CONSUMER_THREADS) return multiply<F, 4>(b);
  multiply<F, MAX_VECTORS>(b);
#endif
}

template <class F>
bool start(const ProductArgs& args, cudaStream_t stream) {
  Layout layout{};
  layout.compute<F>(args, gpu().shared_limit);
  if (layout.stages < TEAMS) return false;
  const int shared = layout.ring + layout.stages * layout.stage;
  cudaFuncSetAttribute(one_row_hopper_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  const int64_t tiles = ((args.gated ? args.out_features / 2 : args.out_features) + 7) / 8;
  const int64_t blocks = std::min<int64_t>(tiles, gpu().processors);
  launch_early(one_row_hopper_kernel<F>, blocks, CONSUMER_THREADS + 32, shared, stream, args, layout);
  check_launch("linear");
  return true;
}

}  // namespace

bool one_row_hopper(const ProductArgs& args, cudaStream_t stream) {
  if (!COMPILED || gpu().major != 9) return false;
  switch (args.group) {
    case 32: return start<HalfBytes<4>>(args, stream);
    case 64: return start<HalfBytes<2>>(args, stream);
    default: return start<HalfBytes<1>>(args, stream);
  }
}

}  // namespace localllm::cuda
