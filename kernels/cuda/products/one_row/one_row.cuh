// Products of one row: weights go from global memory to registers, and every block prepares the activations in its shared
// memory.
//
// A tile is 8 outputs and all inputs. A team of warps computes a tile; teams do not wait for each other. With gates, a
// unit is a tile of gates and the tile of the values that they multiply; else it is one tile. In one step, a team reads
// four chunks of 64 bytes of each output of a tile per warp:
//
//   lane = 4 o + t      output o of 8; 16 bytes t of chunks 4 w … 4 w + 3 of warp w, so the four lanes of an output
//                       read 64 contiguous bytes at a time
//
// A weight format (formats.cuh, floats.cuh) has:
//
//   CHUNK, X_BYTES        inputs of a chunk; bytes of an activation in shared memory
//   GROUPS                records of each chunk; 0: no groups. With large groups, chunks share a record
//   RECORD_BYTES          4: a record is a word, [out_features / 8][records][8]; 1: a byte, [out_features][records]
//   GROUP                 inputs of a group; 0: no groups, or the size is known only at run time
//   HAS_ROW_SCALE         the activations of the row have one scale
//   HAS_OUTPUT_SCALE      each output has one scale
//   MMA                   which output a lane owns (see Lane)
//   Group                 data of a group of activations besides their values
//   Partial, multiply     what a lane adds up over a tile, and how it adds the products of a step
//   Sum, sum_of           the sum of a lane at the end of a tile
#pragma once

#include "floats.cuh"

namespace localllm::cuda {
namespace {

constexpr int STAGES = 2;           // steps whose weights a thread holds in registers
constexpr int RESIDENT_BLOCKS = 2;  // blocks per multiprocessor

struct OneRowArgs {
  ProductArgs args;
  int chunks, subgroups;  // chunks per output; stored scales (with zero points) per output
  int log_chunks;         // log2 of the chunks of a stored scale; 0 if a chunk has several
  int steps, halves;      // steps per tile; tiles per unit
  int units;              // unit u begins with output 8 u; its second tile is units * 8 outputs later
};

// The weights of one step in the registers of a thread.
template <class F>
struct Stage {
  uint32_t weights[4][4];  // 16 bytes of each of four chunks
  uint32_t records[F::GROUPS > 0 ? F::GROUPS : 1];
};

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

__device__ inline void read_weights(const uint8_t* from, uint32_t (&to)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
}

// The team of this thread, its number in the team, its warp in the team, and the output and the 16 bytes that it reads.
// WARPS: those of a team. At the end of a tile, the thread has the sum of the output `owned` over chunk 4 w + part of
// each step; if records are bytes, over group `part` of each chunk.
template <class F, int WARPS>
struct Lane {
  static constexpr int THREADS = WARPS * 32, CHUNKS = 4 * WARPS, TEAMS = CONSUMER_THREADS / THREADS;
  int team = threadIdx.x / THREADS, in_team = threadIdx.x % THREADS;
  int warp = in_team / 32, output = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int owned = F::MMA ? 2 * t + output / 4 : output, part = F::MMA ? output % 4 : t;
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
    const bool owned = at.unit < d.units && block * 8 + lane.owned < d.args.out_features;
    if constexpr (F::RECORD_BYTES == 1) {
      static_assert(F::GROUPS == 4);  // one record for each of the four chunks
      const auto* records = static_cast<const uint8_t*>(d.args.records) + int64_t(block * 8 + lane.owned) * d.subgroups;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int subgroup = (chunk + j) * F::GROUPS + lane.part;
        stage.records[j] = owned && subgroup < d.subgroups ? __ldg(records + subgroup) : 0;
      }
    } else {
      const auto* records =
          static_cast<const uint32_t*>(d.args.records) + int64_t(block) * d.subgroups * 8 + lane.owned;
#pragma unroll
      for (int p = 0; p < F::GROUPS; p++) {
        const int subgroup = ((chunk + lane.part) >> d.log_chunks) * F::GROUPS + p;
        stage.records[p] = owned && subgroup < d.subgroups ? __ldg(records + subgroup * 8) : 0;
      }
    }
  }
}

// The gated activation of kernels/ops/activation.py. Comparisons with a NaN are false, so NaN is not clamped.
__device__ inline float gated(ExpertGate kind, float gate, float up) {
  if (kind != ExpertGate::clamped_swiglu) return activated(Activation(kind), gate) * up;
  constexpr float limit = 7.0f;
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
}

// The output that each of the first 8 threads of a team stores; with gates, a gate and the value that it multiplies.
template <class F, class L>
class Epilogue {
 public:
  __device__ Epilogue(const OneRowArgs& d, const L& lane, int unit) : output_(int64_t(unit) * 8 + lane.in_team) {
    exists_ = lane.in_team < 8 && output_ < d.args.out_features / d.halves;
    if (!exists_ || !F::HAS_OUTPUT_SCALE) return;
    scale_[0] = d.args.scale[output_];
    if (d.halves > 1) scale_[1] = d.args.scale[output_ + d.units * 8];
  }

  // sums: [halves][L::CHUNKS][8]
  __device__ void finish(const OneRowArgs& d, const typename F::Sum* sums, float row_scale) const {
    if (!exists_) return;
    auto value = [&](int half) {
      typename F::Sum sum = 0;
#pragma unroll
      for (int c = 0; c < L::CHUNKS; c++) sum += sums[(half * L::CHUNKS + c) * 8 + threadIdx.x % 8];
      const int64_t output = output_ + half * d.units * 8;
      const float shift = d.args.bias ? number(d.args.bias, d.args.bias_type, output) : 0.0f;
      return float(sum) * (row_scale * scale_[half]) + shift;
    };
    const float result = d.halves > 1 ? gated(d.args.gate, rounded(value(0)), rounded(value(1))) : value(0);
    put(d.args.out, d.args.out_type, output_, result);
  }

 private:
  int64_t output_;
  bool exists_;
  float scale_[2] = {1.0f, 1.0f};
};

// L: Lane. X: the activations, which each block prepares.
template <class F, class L, class X>
__device__ inline void multiply_row(const OneRowArgs& d) {
  extern __shared__ __align__(128) char memory[];
  // Two buffers: a team writes one while 8 threads read the other.
  __shared__ typename F::Sum sums[L::TEAMS][2][2 * L::CHUNKS * 8];
  const L lane;
  const X activations(d.args, memory, d.chunks * F::CHUNK);

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

  const uint32_t x = uint32_t(__cvta_generic_to_shared(memory));
  float row_scale = 1.0f;
  if constexpr (F::HAS_ROW_SCALE) row_scale = activations.groups[0].scale;
  typename F::Partial partial{};
  for (int buffer = 0; at.unit < d.units;) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      F::multiply(lane, d.chunks, at.step * L::CHUNKS + lane.warp * 4, stages[s], x, activations.groups, partial);
      fetch_next(stages[s]);
      const Position before = at;
      at.advance(d, L::TEAMS);
      if (at.half == before.half && at.unit == before.unit) continue;
      sums[lane.team][buffer][(before.half * L::CHUNKS + lane.warp * 4 + lane.part) * 8 + lane.owned] =
          F::sum_of(partial, lane);
      partial = {};
      if (at.unit == before.unit) continue;
      asm volatile("bar.sync %0, %1;" ::"r"(2 + lane.team), "n"(L::THREADS) : "memory");
      epilogue.finish(d, sums[lane.team][buffer], row_scale);
      if (at.unit >= d.units) return;
      epilogue = Epilogue<F, L>(d, lane, at.unit);
      buffer ^= 1;
    }
  }
}

template <class F, class L>
OneRowArgs row_arguments(const ProductArgs& args) {
  OneRowArgs d{args};
  d.chunks = int((args.row_bytes + 63) / 64);
  const int64_t subgroup = F::GROUP ? F::GROUP : std::min(args.group, args.in_features);
  d.subgroups = F::GROUPS ? int((args.in_features + subgroup - 1) / subgroup) : 0;
  while (F::GROUPS && int64_t(F::CHUNK) << d.log_chunks < subgroup) d.log_chunks++;
  d.steps = (d.chunks + L::CHUNKS - 1) / L::CHUNKS;
  d.halves = args.gated ? 2 : 1;
  d.units = int((args.out_features / d.halves + 7) / 8);
  return d;
}

// Bytes of shared memory.
template <class F>
int activation_bytes(const OneRowArgs& d) {
  const int group = int(sizeof(typename F::Group));
  return d.chunks * (F::CHUNK * F::X_BYTES + (F::GROUP > 0 ? F::GROUPS * group : 0)) + group;
}

int64_t resident_blocks() { return int64_t(gpu().processors) * RESIDENT_BLOCKS; }

// Calls launch(n) with a constant n: the vectors of 8 activations per thread. n is the first of N and MORE that suffices;
// each number is another kernel, and the wheel has little room for more.
template <class F, int N, int... MORE, class Launch>
void with_vectors(const OneRowArgs& d, Launch&& launch) {
  if constexpr (sizeof...(MORE) > 0)
    if (d.chunks * F::CHUNK / 8 > N * CONSUMER_THREADS) return with_vectors<F, MORE...>(d, launch);
  launch(std::integral_constant<int, N>{});
}

// Calls call(Format<groups per chunk>) if the kernels support the groups of an int4 weight; else returns false.
template <template <int> class Format, class Call>
bool with_groups(const ProductArgs& args, Call&& call) {
  if (args.row_bytes != round_up(args.in_features, 128) / 2) return false;
  switch (args.group) {
    case 32: return call(Format<4>{});
    case 64: return call(Format<2>{});
    case 128: return call(Format<1>{});
    default: return false;
  }
}

// Calls call(format) if the kernels support the product of one row; else returns false.
template <class Call>
bool with_one_row(const ProductArgs& args, Call&& call) {
  auto call_if_fits = [&](auto format) {
    const int64_t padded = (args.row_bytes + 63) / 64 * decltype(format)::CHUNK;
    return padded <= (args.norm ? MAX_NORMED_FEATURES : MAX_IN_FEATURES) && call(format);
  };
  if (args.rows != 1 || !args.resident) return false;
  if ((args.norm && args.norm_type != Type::bf16) || !aligned({args.norm, args.records}, {})) return false;
  switch (args.format) {
    case Weights::int8: return call_if_fits(Bytes{});
    case Weights::int4: return with_groups<HalfBytes>(args, call_if_fits);
    case Weights::int4_wide: return with_groups<WideHalfBytes>(args, call_if_fits);
    case Weights::fp8: break;
    default: return false;
  }
  if (!args.records) return call_if_fits(E4m3Row<false>{});
  const bool is_power_of_two = (args.group & (args.group - 1)) == 0;
  return is_power_of_two && args.group >= E4m3Row<true>::CHUNK && call_if_fits(E4m3Row<true>{});
}

}  // namespace
}  // namespace localllm::cuda
