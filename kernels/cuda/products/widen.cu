// Dequantises int4 and fp8 weights (layout: small_batch/formats.cuh) into bf16 in memory. torch multiplies them with many
// rows.
#include <algorithm>

#include "product.h"
#include "../device/overlap.cuh"
#include "tiled/formats.cuh"

namespace localllm::cuda {
namespace {

constexpr int OUTPUTS = 8, THREADS = 128;  // a block has eight outputs: their records are adjacent

// A thread has one word of each of the eight outputs, with the weights of eight inputs from input(word) on. The threads of
// a warp store adjacent inputs, so they fill whole sectors of memory. `record`: the scale and, for int4, the zero point.
struct Int4Word {
  using Word = uint32_t;
  static __device__ int input(int word) { return word / 16 * 128 + (word % 4 * 4 + word % 16 / 4) * 8; }
  static __device__ void widen(Word word, uint32_t record, float (&values)[8]) {
    // A nibble in the lowest mantissa bits of 2^23 is the float 2^23 + nibble.
    const float scale = __half2float(__ushort_as_half(uint16_t(record))), less = 8388608.0f + float(record >> 16);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = (__uint_as_float((word >> 4 * i & 15u) | 0x4b000000u) - less) * scale;
  }
};

struct Fp8Word {
  using Word = uint2;
  static __device__ int input(int word) { return word * 8; }
  static __device__ void widen(const Word& word, uint32_t record, float (&values)[8]) {
    const uint2 pairs[2] = {widened_e4m3(word.x), widened_e4m3(word.y)};
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

template <class Format>
__global__ void __launch_bounds__(THREADS) widen_kernel(const __grid_constant__ Outputs a) {
  using Word = typename Format::Word;
  launch_dependents();
  const int word = blockIdx.y * THREADS + threadIdx.x, input = Format::input(word), first = blockIdx.x * OUTPUTS;
  const int count = input < a.in_features ? min(OUTPUTS, a.count - first) : 0;
  Word words[OUTPUTS];
#pragma unroll
  for (int o = 0; o < OUTPUTS; o++)
    if (o < count) words[o] = __ldg(reinterpret_cast<const Word*>(a.weight + (first + o) * a.row_bytes) + word);
  uint32_t records[OUTPUTS] = {};
  if (count && a.records) {
    const auto* from = reinterpret_cast<const uint4*>(a.records) +
                       (int64_t(blockIdx.x) * a.subgroups + input / a.subgroup) * (OUTPUTS / 4);
    reinterpret_cast<uint4*>(records)[0] = __ldg(from), reinterpret_cast<uint4*>(records)[1] = __ldg(from + 1);
  }
  wait_for_previous();  // an earlier kernel may still read the memory of `out`
#pragma unroll
  for (int o = 0; o < OUTPUTS; o++) {
    if (o >= count) continue;
    float values[8];
    Format::widen(words[o], a.records ? records[o] : __float_as_uint(a.scale[first + o]), values);
    save<8>(a.out + int64_t(first + o) * a.in_features + input, values);
  }
}

template <class Format>
void start(const Outputs& outputs, cudaStream_t stream) {
  const int64_t words = outputs.row_bytes / int(sizeof(typename Format::Word));
  const dim3 blocks((outputs.count + OUTPUTS - 1) / OUTPUTS, unsigned((words + THREADS - 1) / THREADS));
  launch_early(widen_kernel<Format>, blocks, THREADS, 0, stream, outputs);
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
  args.format == Weights::int4 ? start<Int4Word>(outputs, stream) : start<Fp8Word>(outputs, stream);
}

}  // namespace localllm::cuda
