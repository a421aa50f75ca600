// Products of one row with int8 or int4 weights: sums of bytes (dp4a), of weights that a ring in shared memory brings.
//
// A tile is 8 outputs over all inputs, a stage of the ring SEGMENT bytes of each of them, copied by one warp
// (cp.async.bulk) without a pause: the ring is filled before the kernel ahead has ended, and the next kernel begins,
// and fills its own, when this one has asked for nearly all of its weights. Each team of four warps has a tile of its
// own. Where outputs are gated, tiles of gates and of what they gate take turns. A lane multiplies chunks, 64 bytes of
// an output:
//
//   lane = 8 c + o      output o of 8; chunks 16 i + 4 w + c of warp w of the team, i = 0, 1, …
//
// which are the chunks of warp 4 w + c of few_rows.cuh. Its sums are added up as they are there: a row has the same
// bits in every batch.
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
  __device__ void finish(const Block& b, int first, const Sum* sums, float row_scale) const {
    if (!held(b, first)) return;
    auto value = [&](int i) {
      const Sum* from = sums + (tile_of(b, 0) + i) * SUMS + threadIdx.x % 8;
      Sum sum = 0;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) sum += from[c * 8];
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

template <class F, int N>
__device__ inline void multiply(const Block& b) {
  using Sum = typename F::Sum;
  const Room& room = b.room;
  const int tiles = b.tiles();
  OneRow<F, N> own(b.a, b.memory + room.x, reinterpret_cast<Rounded*>(b.memory + room.parts), room.chunks * F::CHUNK);
  Answer answer(b, 0);
  await_previous();
  own.fill();

  const int team = threadIdx.x / (TEAM_WARPS * 32), lane = threadIdx.x % 32;
  const int own_chunk = threadIdx.x / 32 % TEAM_WARPS * 4 + lane / 8, output = lane % 8;
  auto* sums = reinterpret_cast<Sum*>(b.memory + room.sums);
  const uint32_t x = hopper::address(own.x), parts = hopper::address(own.parts);
  const uint32_t ring = hopper::address(b.memory + room.ring);
  Turn turn{0, room.stages};
  turn.pass(team);
  for (int first = 0; first < tiles; first += TILES) {
    for (int tile = first + team; tile < min(first + TILES, tiles); tile += TEAMS) {
      const int together = min(TEAMS, tiles - (tile - team));
      Sum sum = 0;
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
    meet_readers();
    answer.finish(b, first, sums, F::GROUP ? 1.0f : own.parts[0].scale);
    if (first + TILES >= tiles) break;
    answer = Answer(b, first + TILES);
    meet_readers();
  }
}

template <class F>
__global__ void __launch_bounds__(READERS + 32, 2) one_row_kernel(const __grid_constant__ ProductArgs args,
                                                                  const __grid_constant__ Room room) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000  // later ones were not tried
  extern __shared__ __align__(128) char memory[];
  const Block b{args, room, memory};
  if (threadIdx.x == READERS) {
    for (int slot = 0; slot < room.stages; slot++) {
      for (int team = 0; team < TEAMS; team++) hopper::init(b.full(team, slot), hopper::ARRIVALS);
      hopper::init(b.empty(slot), TEAM_WARPS * hopper::ARRIVALS);
    }
    hopper::publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= READERS) {
    if (!args.resident) await_previous();
    return fetch<F>(b);
  }
  const int vectors = room.chunks * (F::CHUNK / 8);
  if (vectors <= READERS) return multiply<F, 1>(b);
  if (vectors <= 2 * READERS) return multiply<F, 2>(b);
  multiply<F, MOST_INS / 8 / READERS>(b);
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
    return room.chunks * F::CHUNK <= MOST_INS && room.stages >= TEAMS && take(format, room);
  };
  if (!COMPILED || gpu().major != 9 || args.rows != 1) return false;
  if (args.norm && (args.ins > MOST_NORMED || args.norm_type != Type::bf16 || !aligned({args.norm}, {}))) return false;
  if (args.format == Weights::int8) return as(Bytes{});
  if (args.format != Weights::int4) return false;
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
