// Dequantises int4 and fp8 weights (layout: formats.cuh) into bf16 in memory. torch multiplies them with many rows.
#include <algorithm>

#include "linear.h"
#include "overlap.cuh"
#include "tiled_formats.cuh"

namespace localllm::cuda {
namespace {

constexpr int OUTPUTS = 8, THREADS = 128;  // a block has eight outputs: their records are adjacent

// Each format has in 16 bytes of an output PIECES times eight inputs; input(vector, piece) is the first of the eight.
// `record`: the scale and, for int4, the zero point.
struct Int4Vector {
  static constexpr int PIECES = 4;
  static __device__ int input(int vector, int piece) { return vector / 4 * 128 + piece * 32 + vector % 4 * 8; }
  static __device__ void widen(const uint32_t (&words)[4], int piece, uint32_t record, float (&values)[8]) {
    // A nibble in the lowest mantissa bits of 2^23 is the float 2^23 + nibble.
    const float scale = __half2float(__ushort_as_half(uint16_t(record))), less = 8388608.0f + float(record >> 16);
#pragma unroll
    for (int i = 0; i < 8; i++)
      values[i] = (__uint_as_float((words[piece] >> 4 * i & 15u) | 0x4b000000u) - less) * scale;
  }
};

struct Fp8Vector {
  static constexpr int PIECES = 2;
  static __device__ int input(int vector, int piece) { return vector * 16 + piece * 8; }
  static __device__ void widen(const uint32_t (&words)[4], int piece, uint32_t record, float (&values)[8]) {
    const uint2 pairs[2] = {widened_e4m3(words[2 * piece]), widened_e4m3(words[2 * piece + 1])};
    load<8>(reinterpret_cast<const __nv_bfloat16*>(pairs), values);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] *= __uint_as_float(record);
  }
};

struct Outputs {
  __nv_bfloat16* out;       // [count, in_features]
  const char* weight;       // of the first output
  const uint32_t* records;  // [blocks of eight outputs, subgroups, 8], from the first block on; null: `scale`
  const float* scale;       // [count]
  int64_t row_bytes;
  int count, in_features, subgroup, subgroups;
};

template <class Vector>
__global__ void __launch_bounds__(THREADS) widen_kernel(const __grid_constant__ Outputs a) {
  launch_dependents();
  const int vector = blockIdx.y * THREADS + threadIdx.x, first = blockIdx.x * OUTPUTS;
  const int count = Vector::input(vector, 0) < a.in_features ? min(OUTPUTS, a.count - first) : 0;
  uint32_t words[OUTPUTS][4];
#pragma unroll
  for (int o = 0; o < OUTPUTS; o++)
    if (o < count)
      *reinterpret_cast<uint4*>(words[o]) =
          *reinterpret_cast<const uint4*>(a.weight + (first + o) * a.row_bytes + int64_t(vector) * 16);
  wait_for_previous();  // an earlier kernel may still read the memory of `out`
#pragma unroll
  for (int piece = 0; piece < Vector::PIECES; piece++) {
    const int input = Vector::input(vector, piece);
    if (input >= a.in_features) continue;
    uint32_t records[OUTPUTS] = {};
    if (a.records) {
      const auto* from = reinterpret_cast<const uint4*>(a.records) +
                         (int64_t(blockIdx.x) * a.subgroups + input / a.subgroup) * (OUTPUTS / 4);
      reinterpret_cast<uint4*>(records)[0] = from[0], reinterpret_cast<uint4*>(records)[1] = from[1];
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) {
      if (o >= count) continue;
      float values[8];
      Vector::widen(words[o], piece, a.records ? records[o] : __float_as_uint(a.scale[first + o]), values);
      save<8>(a.out + int64_t(first + o) * a.in_features + input, values);
    }
  }
}

template <class Vector>
void start(const Outputs& outputs, cudaStream_t stream) {
  const dim3 blocks((outputs.count + OUTPUTS - 1) / OUTPUTS, unsigned((outputs.row_bytes / 16 + THREADS - 1) / THREADS));
  launch_early(widen_kernel<Vector>, blocks, THREADS, 0, stream, outputs);
  check_launch("widen");
}

}  // namespace

void widen(const ProductArgs& args, int64_t first, cudaStream_t stream) {
  if (args.rows == 0 || args.in_features == 0) return;
  const int64_t subgroup = std::min(record_inputs(args), args.in_features);
  const int64_t subgroups = (args.in_features + subgroup - 1) / subgroup;
  Outputs outputs{static_cast<__nv_bfloat16*>(args.out), static_cast<const char*>(args.weight) + first * args.row_bytes};
  if (args.records) outputs.records = static_cast<const uint32_t*>(args.records) + first * subgroups;
  else outputs.scale = args.scale + first;
  outputs.row_bytes = args.row_bytes;
  outputs.count = int(args.rows), outputs.in_features = int(args.in_features);
  outputs.subgroup = int(subgroup), outputs.subgroups = int(subgroups);
  args.format == Weights::int4 ? start<Int4Vector>(outputs, stream) : start<Fp8Vector>(outputs, stream);
}

}  // namespace localllm::cuda
