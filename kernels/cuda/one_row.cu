// Products of one row with int8 or int4 weights: sums of bytes (dp4a), of weights that a ring in shared memory brings.
//
// A tile is 8 outputs over all inputs, which one warp copies (cp.async.bulk) without a pause: the ring is filled before
// the kernel ahead has ended, and the next kernel begins, and fills its own, when this one has asked for nearly all of
// its weights. Where outputs are gated, tiles of gates and of what they gate take turns.
//
// int8: a stage is whole outputs, which all warps share. A lane has 16 bytes of every 512 to 4096, whose activations
// are in its registers.
//
// int4: a stage is SEGMENT bytes of each output of a tile. Each team of four warps has a tile of its own. A lane
// multiplies chunks, 64 bytes of an output:
//
//   lane = 8 c + o      output o of 8; chunks 16 i + 4 w + c of warp w of the team, i = 0, 1, …
//
// which are the chunks of warp 4 w + c of few_rows.cuh. Its sums are added up as they are there; sums of whole numbers
// are exact, whatever the order. So a row has the same bits in every batch.
#include "one_row_ring.cuh"

namespace localllm::cuda {
namespace {

#ifdef LOCALLLM_HOPPER
constexpr bool COMPILED = true;
#else
constexpr bool COMPILED = false;  // for other GPUs only: the kernel is empty
#endif

// What one thread adds up and stores of some tiles: an output, or a gate and what it gates.
class Answer {
 public:
  __device__ Answer(const Block& b, int first) {  // asks for what no kernel writes
    if (!held(b, first)) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (i && !b.a.gated) break;
      if (b.a.scale) scale_[i] = b.a.scale[output_of(b, first) + i * b.answers()];
    }
  }

  template <class Sum>
  __device__ void finish(const Block& b, int first, const Sum* sums, float row_scale, int shares) const {
    if (!held(b, first)) return;
    auto value = [&](int i) {
      const Sum* from = sums + (tile_of(b, 0) + i) * SUMS + threadIdx.x % 8;
      Sum sum = 0;
#pragma unroll 8
      for (int c = 0; c < shares; c++) sum += from[c * 8];
      float shift = b.a.bias ? number(b.a.bias, b.a.bias_type, output_of(b, first) + i * b.answers()) : 0.0f;
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
    return b.place_of(tile_of(b, first)) * 8 + int(threadIdx.x) % 8;
  }
  static __device__ bool held(const Block& b, int first) {
    return tile_of(b, first) < min(first + TILES, b.tiles()) && output_of(b, first) < b.answers();
  }
};

// Of the tiles from `first` on, whose sums, `shares` of an output, are there. Whether they are the last.
template <class Sum>
__device__ inline bool finish(const Block& b, int first, Answer& answer, const Sum* sums, float row_scale, int shares) {
  meet_readers();
  answer.finish(b, first, sums, row_scale, shares);
  if (first + TILES >= b.tiles()) return true;
  answer = Answer(b, first + TILES);
  meet_readers();
  return false;
}

// N: as OneRow's.
template <int N, int PER_CHUNK>
__device__ inline void multiply(const Block& b, HalfBytes<PER_CHUNK>) {
  using F = HalfBytes<PER_CHUNK>;
  const Room& room = b.room;
  const int tiles = b.tiles();
  OneRow<F, N> own(b.a, b.memory + room.x, reinterpret_cast<Rounded*>(b.memory + room.parts), room.chunks * F::CHUNK);
  Answer answer(b, 0);
  await_previous();
  own.fill();

  const int team = threadIdx.x / (TEAM_WARPS * 32), lane = threadIdx.x % 32;
  const int own_chunk = threadIdx.x / 32 % TEAM_WARPS * 4 + lane / 8, output = lane % 8;
  auto* sums = reinterpret_cast<float*>(b.memory + room.sums);
  const uint32_t x = hopper::address(own.x), parts = hopper::address(own.parts);
  const uint32_t ring = hopper::address(b.memory + room.ring);
  Turn turn{0, room.stages};
  turn.pass(team);
  for (int first = 0;; first += TILES) {
    for (int tile = first + team; tile < min(first + TILES, tiles); tile += TEAMS) {
      const int together = min(TEAMS, tiles - (tile - team));
      float sum = 0;
      for (int segment = 0; segment < room.segments; segment++) {
        turn.await(b, team);
        const uint32_t stage = ring + turn.slot * room.stage;
#pragma unroll
        for (int within = own_chunk; within < SEGMENT / 64; within += CHUNKS) {
          int chunk = segment * (SEGMENT / 64) + within;
          if (chunk >= room.chunks) continue;
          F::multiply(sum, {stage + output * PITCH + within * 64, x + chunk * F::CHUNK,
                            stage + 8 * PITCH + (within * F::PARTS * 8 + output) * 4,
                            parts + chunk * F::PARTS * int(sizeof(Rounded)), room.subs - 1 - chunk * F::PARTS});
        }
        hopper::give_back(b.empty(turn.slot));
        turn.pass(together);
      }
      sums[(tile - first) * SUMS + own_chunk * 8 + output] = sum;
    }
    if (finish(b, first, answer, sums, 1.0f, CHUNKS)) return;
  }
}

template <int N>
__device__ inline void multiply(const Block& b, Bytes) {
  constexpr int SLICE = 512, X = N < 2 ? 1 : N / 2, ROWS = X == 1 ? 4 : 2;  // slices and outputs of a warp in a stage
  const Room& room = b.room;
  const int tiles = b.tiles(), bytes = int(b.a.row_bytes);
  OneRow<Bytes, N> own(b.a, b.memory + room.x, reinterpret_cast<Rounded*>(b.memory + room.parts), room.chunks * 64);
  Answer answer(b, 0);
  await_previous();
  own.fill();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int shares = bytes <= SLICE ? 1 : bytes <= 2 * SLICE ? 2 : bytes <= 4 * SLICE ? 4 : READERS / 32;
  const int share = warp % shares, own_row = warp / shares, step = READERS / 32 / shares;
  auto* sums = reinterpret_cast<int*>(b.memory + room.sums) + share * 8;
  uint32_t x[X][4] = {};
  int place[X];
#pragma unroll
  for (int i = 0; i < X; i++) {
    place[i] = (share + i * shares) * SLICE + lane * 16;
    if (place[i] < bytes) load_vector(hopper::address(own.x) + place[i], x[i]);
    else place[i] = 0;  // something, by zeros
  }
  const uint32_t ring = hopper::address(b.memory + room.ring);
  Turn turn{0, room.stages};
  for (int first = 0;; first += TILES) {
    for (int tile = first; tile < min(first + TILES, tiles); tile++)
      for (int segment = 0; segment < room.segments; segment++) {
        turn.await(b, 0);
        const uint32_t stage = ring + turn.slot * room.stage;
        uint32_t weights[ROWS][X][4];  // all asked for before one is used
        int sum[ROWS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int i = 0; i < X; i++)
            load_vector(stage + min(own_row + r * step, room.rows - 1) * bytes + place[i], weights[r][i]);
#pragma unroll
        for (int i = 0; i < X; i++)
#pragma unroll
          for (int r = 0; r < ROWS; r++) sum[r] = Bytes::multiply(weights[r][i], x[i], sum[r]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] = __reduce_add_sync(0xffffffffu, sum[r]);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
          if (lane == 0 && own_row + r * step < room.rows)
            sums[(tile - first) * SUMS + segment * room.rows + own_row + r * step] = sum[r];
        hopper::give_back(b.empty(turn.slot));
        turn.pass(1);
      }
    if (finish(b, first, answer, sums - share * 8, own.parts[0].scale, shares)) return;
  }
}

template <class F>
__global__ void __launch_bounds__(READERS + 32, 2) one_row_kernel(const __grid_constant__ ProductArgs args,
                                                                  const __grid_constant__ Room room) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // later ones were not tried
  extern __shared__ __align__(128) char memory[];
  const Block b{args, room, memory};
  if (threadIdx.x == READERS) {
    for (int slot = 0; slot < room.stages; slot++) {
      for (int team = 0; team < TEAMS; team++) hopper::init(b.full(team, slot), hopper::ARRIVALS);
      hopper::init(b.empty(slot), (F::WHOLE ? READERS / 32 : TEAM_WARPS) * hopper::ARRIVALS);
    }
    hopper::publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= READERS) return fetch(b, F{});
  const int vectors = room.chunks * (F::CHUNK / 8);
  if (vectors <= READERS) return multiply<1>(b, F{});
  if (vectors <= 2 * READERS) return multiply<2>(b, F{});
  if (vectors <= 4 * READERS) return multiply<4>(b, F{});
  multiply<MOST_INS / 8 / READERS>(b, F{});
#endif
}

template <class F>
bool start(const ProductArgs& args, const Room& room, cudaStream_t stream) {
  const int shared = room.ring + room.stages * room.stage;
  cudaFuncSetAttribute(one_row_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  const int64_t tiles = ((args.gated ? args.outs / 2 : args.outs) + 7) / 8;
  launch_early(one_row_kernel<F>, std::min<int64_t>(tiles, gpu().processors), READERS + 32, shared, stream, args, room);
  check_launch("linear");
  return true;
}

// Calls take(format, its room) if the product is one of these.
template <class Take>
bool with_room(const ProductArgs& args, Take&& take) {
  auto as = [&](auto format) {
    using F = decltype(format);
    Room room;
    room.template lay_out<F>(args, gpu().shared_limit);
    const int most = args.norm ? MOST_NORMED : MOST_INS;
    return room.chunks * F::CHUNK <= most && room.stages >= TEAMS && take(format, room);
  };
  if (!COMPILED || gpu().major != 9 || args.rows != 1 || !args.resident) return false;
  if ((args.norm && args.norm_type != Type::bf16) || !aligned({args.norm, args.records}, {})) return false;
  if (args.format == Weights::int8) return as(Bytes{});
  if (args.format != Weights::int4 || args.row_bytes != round_up(args.ins, 128) / 2) return false;
  switch (args.group) {
    case 32: return as(HalfBytes<4>{});
    case 64: return as(HalfBytes<2>{});
    case 128: return as(HalfBytes<1>{});
    default: return false;
  }
}

}  // namespace

bool takes_one_row(const ProductArgs& args) {
  return with_room(args, [](auto, const Room&) { return true; });
}

bool one_row(const ProductArgs& args, cudaStream_t stream) {
  return with_room(args, [&](auto format, const Room& room) { return start<decltype(format)>(args, room, stream); });
}

}  // namespace localllm::cuda
