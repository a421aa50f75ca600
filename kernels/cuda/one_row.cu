// Products of one row with int8 or int4 weights on Hopper: int8 dot products (dp4a), with weights from a ring buffer in
// shared memory.
//
// A tile is 8 outputs and all inputs. A producer warp copies tiles to the ring by cp.async.bulk. It fills the ring
// before the previous kernel has ended. When all but a few stages have been requested, it lets the next kernel start,
// which then fills its ring. With gates, tiles of gates alternate with tiles of the values that they multiply.
//
// int8: a stage has the weights of all inputs of its outputs, and all consumer warps work on the same stage. A lane
// multiplies 16 bytes in every 512 to 4096 bytes; their activations are in its registers.
//
// int4: a stage has SEGMENT bytes of each output of a tile. A team of four warps computes a tile. A lane multiplies
// chunks of 64 bytes of one output:
//
//   lane = 8 c + o      output o of 8; chunks 16 i + 4 w + c of warp w of the team, i = 0, 1, …
//
// These are the chunks of warp 4 w + c in small_batch.cuh, and their sums are added in the same order as there. Sums of
// integers are exact in any order. So the result of a row has the same bits in every batch.
#include "one_row_ring.cuh"

namespace localllm::cuda {
namespace {

#ifdef LOCALLLM_HOPPER
constexpr bool COMPILED = true;
#else
constexpr bool COMPILED = false;  // not built for Hopper: the kernel is empty
#endif

// The output that one thread reduces and stores in a group of TILES tiles (with gates: a gate and the value it
// multiplies).
class Epilogue {
 public:
  __device__ Epilogue(const Block& b, int first) {  // needs no wait_for_previous: no kernel writes the scales
    if (!has_output(b, first)) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (i && !b.a.gated) break;
      if (b.a.scale) scale_[i] = b.a.scale[output_of(b, first) + i * b.outputs()];
    }
  }

  template <class Sum>
  __device__ void finish(const Block& b, int first, const Sum* sums, float row_scale, int shares) const {
    if (!has_output(b, first)) return;
    auto value = [&](int i) {
      const Sum* from = sums + (tile_of(b, 0) + i) * SUMS + threadIdx.x % 8;
      Sum sum = 0;
#pragma unroll 8
      for (int c = 0; c < shares; c++) sum += from[c * 8];
      float shift = b.a.bias ? number(b.a.bias, b.a.bias_type, output_of(b, first) + i * b.outputs()) : 0.0f;
      return float(sum) * (row_scale * scale_[i]) + shift;
    };
    float result = b.a.gated ? activated(b.a.gate, rounded(value(0))) * rounded(value(1)) : value(0);
    put(b.a.out, b.a.out_type, output_of(b, first), result);
  }

 private:
  float scale_[2] = {1.0f, 1.0f};

  static __device__ int tile_of(const Block& b, int first) {
    return first + int(threadIdx.x) / 8 * (b.a.gated ? 2 : 1);
  }
  static __device__ int output_of(const Block& b, int first) {
    return b.output_block_of(tile_of(b, first)) * 8 + int(threadIdx.x) % 8;
  }
  static __device__ bool has_output(const Block& b, int first) {
    return tile_of(b, first) < min(first + TILES, b.tiles()) && output_of(b, first) < b.outputs();
  }
};

// Stores the outputs of the tiles from `first` on. `sums` has `shares` partial sums per output. Returns true after the
// block's last tiles, else prepares `epilogue` for the next ones.
template <class Sum>
__device__ inline bool finish(const Block& b, int first, Epilogue& epilogue, const Sum* sums, float row_scale,
                              int shares) {
  sync_consumers();
  epilogue.finish(b, first, sums, row_scale, shares);
  if (first + TILES >= b.tiles()) return true;
  epilogue = Epilogue(b, first + TILES);
  sync_consumers();
  return false;
}

// int4. N: vectors of activations per thread (see OneRow).
template <int N, int PER_CHUNK>
__device__ inline void multiply(const Block& b, HalfBytes<PER_CHUNK>) {
  using F = HalfBytes<PER_CHUNK>;
  const Layout& layout = b.layout;
  const int tiles = b.tiles();
  OneRow<F, N> activations(b.a, b.memory + layout.x, reinterpret_cast<Rounded*>(b.memory + layout.groups),
                           layout.chunks * F::CHUNK);
  Epilogue epilogue(b, 0);
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
    if (finish(b, first, epilogue, sums, 1.0f, CHUNKS)) return;
  }
}

template <int N>
__device__ inline void multiply(const Block& b, Bytes) {
  // X: 16-byte loads per lane and output; ROWS: outputs per warp and stage.
  constexpr int SLICE = 512, X = N < 2 ? 1 : N / 2, ROWS = X == 1 ? 4 : 2;
  const Layout& layout = b.layout;
  const int tiles = b.tiles(), bytes = int(b.a.row_bytes);
  OneRow<Bytes, N> activations(b.a, b.memory + layout.x, reinterpret_cast<Rounded*>(b.memory + layout.groups),
                               layout.chunks * 64);
  Epilogue epilogue(b, 0);
  wait_for_previous();
  activations.fill();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int shares = bytes <= SLICE ? 1 : bytes <= 2 * SLICE ? 2 : bytes <= 4 * SLICE ? 4 : CONSUMER_THREADS / 32;
  const int share = warp % shares, own_row = warp / shares, step = CONSUMER_THREADS / 32 / shares;
  auto* sums = reinterpret_cast<int*>(b.memory + layout.sums) + share * 8;
  uint32_t x[X][4] = {};
  int offsets[X];
#pragma unroll
  for (int i = 0; i < X; i++) {
    offsets[i] = (share + i * shares) * SLICE + lane * 16;
    if (offsets[i] < bytes) load_vector(hopper::address(activations.x) + offsets[i], x[i]);
    else offsets[i] = 0;  // a valid address; x[i] is zero
  }
  const uint32_t ring = hopper::address(b.memory + layout.ring);
  RingPosition position{0, layout.stages};
  for (int first = 0;; first += TILES) {
    for (int tile = first; tile < min(first + TILES, tiles); tile++)
      for (int segment = 0; segment < layout.segments; segment++) {
        position.wait_barrier(b, 0);
        const uint32_t stage = ring + position.slot * layout.stage;
        uint32_t weights[ROWS][X][4];  // all loads start before the first use
        int sum[ROWS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int i = 0; i < X; i++)
            load_vector(stage + min(own_row + r * step, layout.rows - 1) * bytes + offsets[i], weights[r][i]);
#pragma unroll
        for (int i = 0; i < X; i++)
#pragma unroll
          for (int r = 0; r < ROWS; r++) sum[r] = Bytes::multiply(weights[r][i], x[i], sum[r]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] = __reduce_add_sync(0xffffffffu, sum[r]);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
          if (lane == 0 && own_row + r * step < layout.rows)
            sums[(tile - first) * SUMS + segment * layout.rows + own_row + r * step] = sum[r];
        hopper::release_stage(b.empty(position.slot));
        position.advance(1);
      }
    if (finish(b, first, epilogue, sums - share * 8, activations.groups[0].scale, shares)) return;
  }
}

template <class F>
__global__ void __launch_bounds__(CONSUMER_THREADS + 32, 2)
    one_row_kernel(const __grid_constant__ ProductArgs args, const __grid_constant__ Layout layout) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // not tested on later GPUs
  extern __shared__ __align__(128) char memory[];
  const Block b{args, layout, memory};
  if (threadIdx.x == CONSUMER_THREADS) {
    for (int slot = 0; slot < layout.stages; slot++) {
      for (int team = 0; team < TEAMS; team++) hopper::init(b.full(team, slot), hopper::ARRIVALS);
      hopper::init(b.empty(slot), (F::COMPLETE_OUTPUTS ? CONSUMER_THREADS / 32 : TEAM_WARPS) * hopper::ARRIVALS);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMER_THREADS) return fetch(b, F{});
  const int vectors = layout.chunks * (F::CHUNK / 8);
  if (vectors <= CONSUMER_THREADS) return multiply<1>(b, F{});
  if (vectors <= 2 * CONSUMER_THREADS) return multiply<2>(b, F{});
  if (vectors <= 4 * CONSUMER_THREADS) return multiply<4>(b, F{});
  multiply<MAX_IN_FEATURES / 8 / CONSUMER_THREADS>(b, F{});
#endif
}

template <class F>
bool start(const ProductArgs& args, const Layout& layout, cudaStream_t stream) {
  const int shared = layout.ring + layout.stages * layout.stage;
  cudaFuncSetAttribute(one_row_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  const int64_t tiles = ((args.gated ? args.out_features / 2 : args.out_features) + 7) / 8;
  const int64_t blocks = std::min<int64_t>(tiles, gpu().processors);
  launch_early(one_row_kernel<F>, blocks, CONSUMER_THREADS + 32, shared, stream, args, layout);
  check_launch("linear");
  return true;
}

// Calls call(format, layout) if this kernel supports the product; else returns false.
template <class Call>
bool with_layout(const ProductArgs& args, Call&& call) {
  auto as = [&](auto format) {
    using F = decltype(format);
    Layout layout;
    layout.template compute<F>(args, gpu().shared_limit);
    const int limit = args.norm ? MAX_NORMED_FEATURES : MAX_IN_FEATURES;
    return layout.chunks * F::CHUNK <= limit && layout.stages >= TEAMS && call(format, layout);
  };
  if (!COMPILED || gpu().major != 9 || args.rows != 1 || !args.resident) return false;
  if ((args.norm && args.norm_type != Type::bf16) || !aligned({args.norm, args.records}, {})) return false;
  if (args.format == Weights::int8) return as(Bytes{});
  if (args.format != Weights::int4 || args.row_bytes != round_up(args.in_features, 128) / 2) return false;
  switch (args.group) {
    case 32: return as(HalfBytes<4>{});
    case 64: return as(HalfBytes<2>{});
    case 128: return as(HalfBytes<1>{});
    default: return false;
  }
}

}  // namespace

bool takes_one_row(const ProductArgs& args) {
  return with_layout(args, [](auto, const Layout&) { return true; });
}

bool one_row(const ProductArgs& args, cudaStream_t stream) {
  return with_layout(args,
                     [&](auto format, const Layout& layout) { return start<decltype(format)>(args, layout, stream); });
}

}  // namespace localllm::cuda
