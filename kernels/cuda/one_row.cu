// Products of one row with int8 or int4 weights: int8 dot products (dp4a), with weights that go from global memory to
// registers. On Hopper, one_row_hopper.cu computes those with int4 weights. In a mixture of experts, each choice of a
// token is a row with the weights of its expert.
//
// A tile is 8 outputs and all inputs. A team of warps (four, for choices two) computes a tile; teams do not wait for each
// other. With gates, a unit is a tile of gates and the tile of the values that they multiply; else it is one tile. In one
// step, a team reads four chunks of 64 bytes of each output of a tile per warp:
//
//   lane = 4 o + t      output o of 8; 16 bytes t of chunks 4 w … 4 w + 3 of warp w, so the four lanes of an output
//                       read 64 contiguous bytes at a time
//
// int4: the four lanes exchange their integer sums, so that lane t has the sum of chunk 4 w + t. In a team of four, these
// are the chunks of warp 4 w + t in small_batch.cuh, and their sums are added in the same order as there. int8: all sums
// are integers, which are exact in any order, so nothing is exchanged. So the result of a row has the same bits in every
// batch; this is not so for choices.
#include "one_row_activations.cuh"

namespace localllm::cuda {
namespace {

constexpr int CHOICE_TEAM_WARPS = 2;    // fewer than TEAM_WARPS, because the experts' outputs have few chunks
constexpr int STAGES = 2;               // steps whose weights a thread holds in registers
constexpr int RESIDENT_BLOCKS = 2;      // blocks per multiprocessor

struct OneRowArgs {
  ProductArgs args;
  int chunks, subgroups;  // chunks per output; scales (with zero points) per output
  int steps, halves;      // steps per tile; tiles per unit
  int units;              // unit u begins with output 8 u; its second tile is units * 8 outputs later
};

// The weights of one step in the registers of a thread.
template <class F>
struct Stage {
  uint32_t weights[4][4];  // 16 bytes of each of four chunks
  uint32_t records[F::GROUPS > 0 ? F::GROUPS : 1];
};

template <class F>
using SumOf = std::conditional_t<F::GROUPS == 0, int, float>;

// A step of a unit of this team.
struct Position {
  int unit, half, step;
  __device__ void advance(const OneRowArgs& d, int teams) {
    if (++step < d.steps) return;
    step = 0;
    if (++half < d.halves) return;
    half = 0;
    unit += int(gridDim.x) * teams;
  }
};

static __device__ inline void read_weights(const uint8_t* from, uint32_t (&to)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}

// The team of this thread, its number in the team, its warp in the team, and the output and the 16 bytes that it reads.
// WARPS: those of a team.
template <int WARPS>
struct Lane {
  static constexpr int THREADS = WARPS * 32, CHUNKS = 4 * WARPS, TEAMS = CONSUMER_THREADS / THREADS;
  int team = threadIdx.x / THREADS, in_team = threadIdx.x % THREADS;
  int warp = in_team / 32, output = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
};

// Starts to read the weights of a step; zeros where there are none.
template <class F, class L>
__device__ inline void fetch(const OneRowArgs& d, const L& lane, const Position& at, Stage<F>& stage) {
  const int block = at.unit + at.half * d.units, output = block * 8 + lane.output;
  const bool exists = at.unit < d.units && output < d.args.out_features;
  const int chunk = at.step * L::CHUNKS + lane.warp * 4;
  const int first = chunk * 64 + lane.t * 16;
  const uint8_t* from = static_cast<const uint8_t*>(d.args.weight) + int64_t(output) * d.args.row_bytes + first;
#pragma unroll
  for (int j = 0; j < 4; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) stage.weights[j][e] = 0;
    if (exists && first + j * 64 < int(d.args.row_bytes)) read_weights(from + j * 64, stage.weights[j]);
  }
  if constexpr (F::GROUPS > 0) {
    const auto* records = static_cast<const uint32_t*>(d.args.records) + int64_t(block) * d.subgroups * 8 + lane.output;
#pragma unroll
    for (int p = 0; p < F::GROUPS; p++) {
      const int subgroup = (chunk + lane.t) * F::GROUPS + p;
      stage.records[p] = exists && subgroup < d.subgroups ? __ldg(records + subgroup * 8) : 0;
    }
  }
}

// Lane t of the four lanes of an output gets the sum of their values[t].
static __device__ inline int exchange(const int (&values)[4], int t) {
  int pair[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int sent = t & 2 ? values[j] : values[2 + j];
    pair[j] = (t & 2 ? values[2 + j] : values[j]) + __shfl_xor_sync(0xffffffffu, sent, 2);
  }
  const int sent = t & 1 ? pair[0] : pair[1];
  return (t & 1 ? pair[1] : pair[0]) + __shfl_xor_sync(0xffffffffu, sent, 1);
}

// Adds the products of a step to `sum`. `x`: address of the activations; `groups`: their scales and sums.
template <int PER_CHUNK, class L>
__device__ inline void multiply(HalfBytes<PER_CHUNK>, const OneRowArgs& d, const L& lane, int step,
                                const Stage<HalfBytes<PER_CHUNK>>& stage, uint32_t x, const Rounded* groups,
                                float& sum) {
  using F = HalfBytes<PER_CHUNK>;
  const int chunk = step * L::CHUNKS + lane.warp * 4;
  int values[PER_CHUNK][4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int even[PER_CHUNK] = {}, odd[PER_CHUNK] = {};
    F::multiply(stage.weights[j], x + min(chunk + j, d.chunks - 1) * F::CHUNK + lane.t * 32, even, odd);
#pragma unroll
    for (int p = 0; p < PER_CHUNK; p++) values[p][j] = even[p] + (odd[p] >> 4);
  }
  int integers[PER_CHUNK];
#pragma unroll
  for (int p = 0; p < PER_CHUNK; p++) integers[p] = exchange(values[p], lane.t);
  const int lane_chunk = chunk + lane.t;
  if (lane_chunk >= d.chunks) return;
#pragma unroll
  for (int p = 0; p < PER_CHUNK; p++) F::add(sum, integers[p], stage.records[p], groups[lane_chunk * PER_CHUNK + p]);
}

template <class L>
__device__ inline void multiply(Bytes, const OneRowArgs& d, const L& lane, int step, const Stage<Bytes>& stage, uint32_t x,
                                const Rounded*, int& sum) {
  const int chunk = step * L::CHUNKS + lane.warp * 4;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint32_t values[4];
    load_vector(x + min(chunk + j, d.chunks - 1) * Bytes::CHUNK + lane.t * 16, values);
    sum = Bytes::multiply(stage.weights[j], values, sum);
  }
}

// The output that each of the first 8 threads of a team stores; with gates, a gate and the value that it multiplies.
template <class F, class L>
class Epilogue {
 public:
  __device__ Epilogue(const OneRowArgs& d, const L& lane, int unit) : output_(int64_t(unit) * 8 + lane.in_team) {
    exists_ = lane.in_team < 8 && output_ < d.args.out_features / d.halves;
    if (!exists_ || F::GROUPS > 0) return;  // scales of groups are in the sums
    scale_[0] = d.args.scale[output_];
    if (d.halves > 1) scale_[1] = d.args.scale[output_ + d.units * 8];
  }

  // sums: [halves][L::CHUNKS][8]
  __device__ void finish(const OneRowArgs& d, const SumOf<F>* sums, float row_scale) const {
    if (!exists_) return;
    auto value = [&](int half) {
      SumOf<F> sum = 0;
#pragma unroll
      for (int c = 0; c < L::CHUNKS; c++) sum += sums[(half * L::CHUNKS + c) * 8 + threadIdx.x % 8];
      const int64_t output = output_ + half * d.units * 8;
      const float shift = d.args.bias ? number(d.args.bias, d.args.bias_type, output) : 0.0f;
      return float(sum) * (row_scale * scale_[half]) + shift;
    };
    const float result =
        d.halves > 1 ? activated(d.args.gate, rounded(value(0))) * rounded(value(1)) : value(0);
    put(d.args.out, d.args.out_type, output_, result);
  }

 private:
  int64_t output_;
  bool exists_;
  float scale_[2] = {1.0f, 1.0f};
};

// N: vectors of activations per thread (see OneRow). L: Lane.
template <class F, int N, class L>
__device__ inline void multiply_row(const OneRowArgs& d) {
  extern __shared__ __align__(128) char memory[];
  __shared__ SumOf<F> sums[L::TEAMS][2][2 * L::CHUNKS * 8];  // two buffers: a team writes one while 8 threads read the other
  const L lane;
  const int padded = d.chunks * F::CHUNK;
  OneRow<F, N> activations(d.args, memory, reinterpret_cast<Rounded*>(memory + padded), padded);

  Position ahead{int(blockIdx.x) + lane.team * int(gridDim.x), 0, 0};
  Position at = ahead;
  Stage<F> stages[STAGES];
  auto fetch_next = [&](Stage<F>& stage) {
    fetch(d, lane, ahead, stage);
    ahead.advance(d, L::TEAMS);
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) fetch_next(stages[s]);
  Epilogue<F, L> epilogue(d, lane, at.unit);
  wait_for_previous();
  activations.fill();
  launch_dependents();

  const uint32_t x = uint32_t(__cvta_generic_to_shared(activations.x));
  const float row_scale = F::GROUPS ? 1.0f : activations.groups[0].scale;
  SumOf<F> sum = 0;
  for (int buffer = 0; at.unit < d.units;) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      multiply(F{}, d, lane, at.step, stages[s], x, activations.groups, sum);
      fetch_next(stages[s]);
      const Position before = at;
      at.advance(d, L::TEAMS);
      if (at.half == before.half && at.unit == before.unit) continue;
      sums[lane.team][buffer][((before.half * L::CHUNKS + lane.warp * 4 + lane.t) * 8) + lane.output] = sum;
      sum = 0;
      if (at.unit == before.unit) continue;
      asm volatile("bar.sync %0, %1;" ::"r"(2 + lane.team), "n"(L::THREADS) : "memory");
      epilogue.finish(d, sums[lane.team][buffer], row_scale);
      if (at.unit >= d.units) return;
      epilogue = Epilogue<F, L>(d, lane, at.unit);
      buffer ^= 1;
    }
  }
}

template <class F, int N>
__global__ void __launch_bounds__(CONSUMER_THREADS, RESIDENT_BLOCKS)
    one_row_kernel(const __grid_constant__ OneRowArgs d) {
  multiply_row<F, N, Lane<TEAM_WARPS>>(d);
}

struct ChoiceRowArgs {
  OneRowArgs row;  // of choice 0 and expert 0
  const int32_t* experts;
  int choices_per_row;
  bool early;
};

// Blocks with blockIdx.y = c compute choice c.
template <class F, int N>
__global__ void __launch_bounds__(CONSUMER_THREADS, RESIDENT_BLOCKS)
    choice_row_kernel(const __grid_constant__ ChoiceRowArgs all) {
  if (!all.early) wait_for_previous();
  const int64_t choice = blockIdx.y, outputs = all.experts[choice] * all.row.args.out_features;
  OneRowArgs d = all.row;
  ProductArgs& a = d.args;
  auto move = [](auto& pointer, int64_t bytes) {
    using Pointer = std::remove_reference_t<decltype(pointer)>;
    if (pointer) pointer = Pointer(uintptr_t(pointer) + bytes);
  };
  move(a.x, choice / all.choices_per_row * a.x_stride * 2);
  move(a.out, choice * a.out_stride * (a.out_type == Type::f32 ? 4 : 2));
  move(a.weight, outputs * a.row_bytes);
  move(a.records, outputs * d.subgroups * 4);
  move(a.scale, outputs * 4);
  move(a.bias, outputs * (a.bias_type == Type::f32 ? 4 : 2));
  a.norm = a.stream = nullptr;
  multiply_row<F, N, Lane<CHOICE_TEAM_WARPS>>(d);
}

template <class F, class L>
OneRowArgs row_arguments(const ProductArgs& args) {
  OneRowArgs d{args};
  d.chunks = int((args.row_bytes + 63) / 64);
  d.subgroups = F::GROUP ? int((args.in_features + F::GROUP - 1) / std::max(F::GROUP, 1)) : 0;
  d.steps = (d.chunks + L::CHUNKS - 1) / L::CHUNKS;
  d.halves = args.gated ? 2 : 1;
  d.units = int((args.out_features / d.halves + 7) / 8);
  return d;
}

// Bytes of shared memory.
template <class F>
int shared_of(const OneRowArgs& d) {
  return d.chunks * (F::CHUNK + F::GROUPS * int(sizeof(Rounded))) + (F::GROUPS ? 0 : int(sizeof(Rounded)));
}

// Calls launch(N), a constant: the vectors of activations per thread.
template <class F, class Launch>
void with_vectors(const OneRowArgs& d, Launch&& launch) {
  const int vectors = d.chunks * F::CHUNK / 8;
  if (vectors <= CONSUMER_THREADS) launch(std::integral_constant<int, 1>{});
  else if (vectors <= 2 * CONSUMER_THREADS) launch(std::integral_constant<int, 2>{});
  else if (vectors <= 4 * CONSUMER_THREADS) launch(std::integral_constant<int, 4>{});
  else launch(std::integral_constant<int, MAX_IN_FEATURES / 8 / CONSUMER_THREADS>{});
  check_launch("linear");
}

int64_t resident_blocks() { return int64_t(gpu().processors) * RESIDENT_BLOCKS; }

template <class F>
void start(const ProductArgs& args, cudaStream_t stream) {
  const OneRowArgs d = row_arguments<F, Lane<TEAM_WARPS>>(args);
  const int64_t blocks = std::min<int64_t>(d.units, resident_blocks());
  with_vectors<F>(d, [&](auto n) {
    launch_early(one_row_kernel<F, n>, blocks, CONSUMER_THREADS, shared_of<F>(d), stream, d);
  });
}

template <class F>
void start(const ChoiceArgs& args, cudaStream_t stream) {
  using L = Lane<CHOICE_TEAM_WARPS>;
  const ChoiceRowArgs all{row_arguments<F, L>(args.product), args.experts, int(args.choices_per_row), args.early};
  const OneRowArgs& d = all.row;
  const int64_t blocks = std::clamp<int64_t>(resident_blocks() / args.choices, 1, (d.units + L::TEAMS - 1) / L::TEAMS);
  with_vectors<F>(d, [&](auto n) {
    launch_early(choice_row_kernel<F, n>, dim3(blocks, args.choices), CONSUMER_THREADS, shared_of<F>(d), stream, all);
  });
}

// Calls call(format) if this kernel supports the product; else returns false.
template <class Call>
bool with_format(const ProductArgs& args, Call&& call) {
  auto call_if_fits = [&](auto format) {
    const int64_t padded = (args.row_bytes + 63) / 64 * decltype(format)::CHUNK;
    return padded <= (args.norm ? MAX_NORMED_FEATURES : MAX_IN_FEATURES) && call(format);
  };
  if (args.rows != 1 || !args.resident) return false;
  if ((args.norm && args.norm_type != Type::bf16) || !aligned({args.norm, args.records}, {})) return false;
  if (args.format == Weights::int8) return call_if_fits(Bytes{});
  if (args.format != Weights::int4 || args.row_bytes != round_up(args.in_features, 128) / 2) return false;
  switch (args.group) {
    case 32: return call_if_fits(HalfBytes<4>{});
    case 64: return call_if_fits(HalfBytes<2>{});
    case 128: return call_if_fits(HalfBytes<1>{});
    default: return false;
  }
}

}  // namespace

bool takes_one_row(const ProductArgs& args) {
  return with_format(args, [](auto) { return true; });
}

bool one_row(const ProductArgs& args, cudaStream_t stream) {
  return with_format(args, [&](auto format) {
    using F = decltype(format);
    if (F::GROUPS == 0 || !one_row_hopper(args, stream)) start<F>(args, stream);
    return true;
  });
}

bool choice_products(const ChoiceArgs& args, cudaStream_t stream) {
  return with_format(args.product, [&](auto format) {
    if (args.choices > 0 && args.product.out_features > 0) start<decltype(format)>(args, stream);
    return true;
  });
}

}  // namespace localllm::cuda
