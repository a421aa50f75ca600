// Prepares activations of a product in a separate kernel: rounds them to int8 or e4m3, with a scale per row or per group of
// inputs, and reorders inputs. One block per row. Used where it would be slower to prepare the activations in every block
// of the product (prepared_rows.cuh), and for products by torch.
#include <cuda_fp8.h>

#include <algorithm>

#include "product.h"
#include "prepared_rows.cuh"

namespace localllm::cuda {

namespace {

constexpr int ROW_VECTORS = 4, MAX_ROW_THREADS = 768;  // a block keeps up to 4 vectors of 8 inputs per thread

__device__ uint32_t largest_of_block(uint32_t x) {
  __shared__ uint32_t maxima[32];
  x = __reduce_max_sync(0xffffffffu, x);
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = x;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, threadIdx.x % 32 < blockDim.x / 32 ? maxima[threadIdx.x % 32] : 0u);
}

// Writes eight integers of a row. Inputs from `k` on, a multiple of 8.
__device__ void store(const RowArgs& a, int8_t* row, int64_t k, uint2 integers) {
  if (a.order == InputOrder::natural) {
    *reinterpret_cast<uint2*>(row + k) = integers;
    return;
  }
  auto* to = reinterpret_cast<uint32_t*>(row + k / 32 * 32 + k % 32 / 2);
  to[0] = __byte_perm(integers.x, integers.y, 0x6420);
  to[4] = __byte_perm(integers.x, integers.y, 0x7531);
}

// How a kernel prepares the inputs of a row: one scale for the row, one for each group of inputs, or no rounding.
enum class Rounding { row, groups_of_32, groups_of_64, groups_of_128, none };

__device__ void store_arranged(const RowArgs& a, int64_t row, int64_t k, const uint4& v) {
  auto* out = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(a.out) + row * a.padded);
  if (a.order == InputOrder::natural) {
    *reinterpret_cast<uint4*>(out + k / 2) = v;
    return;
  }
  if (a.order == InputOrder::pairs) {
    uint32_t* to = out + k / 16 * 8 + k % 16 / 4;
    *reinterpret_cast<uint2*>(to) = {v.x, v.z};
    *reinterpret_cast<uint2*>(to + 4) = {v.y, v.w};
    return;
  }
  uint32_t* to = out + k / 32 * 16 + k % 32 / 8;
  to[0] = __byte_perm(v.x, v.z, 0x5410);
  to[4] = __byte_perm(v.x, v.z, 0x7632);
  to[8] = __byte_perm(v.y, v.w, 0x5410);
  to[12] = __byte_perm(v.y, v.w, 0x7632);
}

// Eight integers times their scale, in bf16.
__device__ uint4 dequantised(uint2 integers, float scale) {
  const auto* bytes = reinterpret_cast<const int8_t*>(&integers);
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] = float(bytes[i]) * scale;
  uint4 vector;
  pack(vector, values);
  return vector;
}

// The scale of inputs whose largest magnitude is `limit`.
__device__ float scale_of(const RowArgs& a, float limit) { return __fdiv_rn(limit, a.e4m3 ? 448.0f : 127.0f); }

// Eight values in the format of the product, divided by the scale of `limit`, the largest magnitude.
__device__ uint2 rounded_inputs(const RowArgs& a, const float (&values)[8], float limit) {
  if (!a.e4m3) return rounded_to_int8(values, limit);
  const float factor = limit == 0.0f ? 0.0f : __fdiv_rn(448.0f, limit);
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; i += 2)
    words[i / 4] |= uint32_t(__nv_cvt_float2_to_fp8x2({values[i] * factor, values[i + 1] * factor}, __NV_SATFINITE,
                                                      __NV_E4M3)) << 8 * (i % 4);
  return {words[0], words[1]};
}

// A row, or a part of it, in the registers of a block: vectors of 8 inputs, the thread's i-th vector starts at input(i).
template <int VECTORS>
struct Row {
  const RowArgs& a;
  int64_t row;
  int part;
  uint4 vectors[VECTORS];

  __device__ int input(int i) const { return ((part * VECTORS + i) * int(blockDim.x) + int(threadIdx.x)) * 8; }
  __device__ uint4 read(const void* from, int64_t offset, int i) const {
    if (input(i) >= a.in_features) return {};
    return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + offset + input(i));
  }
  __device__ void load_row() {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) vectors[i] = read(a.x, row * a.x_stride, i);
  }
  // Writes the vectors as integers. LANES: neighbouring lanes that share a scale; 0: the whole row.
  template <int LANES>
  __device__ void round() const {
    const int subgroup = a.subgroup ? int(a.subgroup) : int(a.in_features);
    const int64_t subgroups = (a.in_features + subgroup - 1) / subgroup;
    auto store_scale = [&](int64_t s, float limit) {
      if (!a.scales) return;
      a.scales[a.scale_pitch ? s * a.scale_pitch + row : row * subgroups + s] = scale_of(a, limit);
    };
    uint32_t largest = 0;
    float values[8];
    if constexpr (!LANES) {
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        unpack(vectors[i], values);
        largest = magnitude(values, largest);
      }
      largest = largest_of_block(largest);
      for (int64_t s = threadIdx.x; s < subgroups; s += blockDim.x) store_scale(s, __uint_as_float(largest));
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      unpack(vectors[i], values);
      if constexpr (LANES) {
        largest = magnitude(values, 0);
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2)
          largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
        if (input(i) < a.in_features && input(i) % subgroup == 0)
          store_scale(input(i) / subgroup, __uint_as_float(largest));
      }
      if (input(i) >= a.padded) continue;
      const uint2 integers = rounded_inputs(a, values, __uint_as_float(largest));
      if (a.scales) store(a, static_cast<int8_t*>(a.out) + row * a.padded, input(i), integers);
      else store_arranged(a, row, input(i), dequantised(integers, __fdiv_rn(__uint_as_float(largest), 127.0f)));
    }
  }
};

// Without a maximum over the row, the parts of a row have separate blocks.
template <Rounding ROUNDING>
constexpr bool IN_PARTS = ROUNDING != Rounding::row;

// Part `part` of a row has blockDim.x vectors. Else a block has a row, with up to ROW_VECTORS vectors per thread.
template <Rounding ROUNDING>
__global__ void __launch_bounds__(MAX_ROW_THREADS) prepare_row_kernel(const __grid_constant__ RowArgs a, int parts) {
  launch_dependents();
  constexpr int VECTORS = IN_PARTS<ROUNDING> ? 1 : ROW_VECTORS;
  Row<VECTORS> row{a, int(blockIdx.x) / parts, int(blockIdx.x) % parts};
  wait_for_previous();
  row.load_row();
  if constexpr (ROUNDING == Rounding::none) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      if (row.input(i) < a.padded) store_arranged(a, row.row, row.input(i), row.vectors[i]);
  } else {
    row.template round<ROUNDING == Rounding::row ? 0 : 2 << int(ROUNDING)>();
  }
}

// ONE_GROUP: all threads round the group of a row, else each warp rounds a group at a time.
template <bool ONE_GROUP>
__global__ void round_rows_kernel(const __grid_constant__ RowArgs a) {
  launch_dependents();
  wait_for_previous();
  const int row = blockIdx.x, warps = blockDim.x / 32;
  const int first = ONE_GROUP ? threadIdx.x : threadIdx.x % 32, threads = ONE_GROUP ? blockDim.x : 32;
  const auto* x = static_cast<const __nv_bfloat16*>(a.x) + row * a.x_stride;
  const int64_t subgroups = a.subgroup ? (a.in_features + a.subgroup - 1) / a.subgroup : 1;
  const int64_t size = ONE_GROUP ? a.in_features : a.group;
  for (int64_t from = ONE_GROUP ? 0 : threadIdx.x / 32 * size; from < a.in_features;
       from += ONE_GROUP ? size : warps * size) {
    const int64_t end = min(a.in_features, from + size);
    uint32_t largest = 0;
    float values[8];
    for (int64_t k = from + 8 * first; k < end; k += 8 * threads) {
      load<8>(x + k, values);
      largest = magnitude(values, largest);
    }
    largest = ONE_GROUP ? largest_of_block(largest) : __reduce_max_sync(0xffffffffu, largest);
    const float limit = __uint_as_float(largest);
    const int64_t stop = end == a.in_features ? a.padded : end;
    for (int64_t k = from + 8 * first; k < stop; k += 8 * threads) {
      if (k < end) load<8>(x + k, values);
      const uint2 integers = k < end ? rounded_inputs(a, values, limit) : uint2{};
      if (a.scales) store(a, static_cast<int8_t*>(a.out) + row * a.padded, k, integers);
      else store_arranged(a, row, k, dequantised(integers, __fdiv_rn(limit, 127.0f)));
    }
    if (!a.scales) continue;
    const int64_t last = a.subgroup ? (end + a.subgroup - 1) / a.subgroup : 1;
    for (int64_t s = (a.subgroup ? from / a.subgroup : 0) + first; s < last; s += threads)
      a.scales[a.scale_pitch ? s * a.scale_pitch + row : row * subgroups + s] = scale_of(a, limit);
  }
}

// For rows of any length.
__global__ void arrange_rows_kernel(const __grid_constant__ RowArgs a) {
  launch_dependents();
  wait_for_previous();
  const auto* x = static_cast<const __nv_bfloat16*>(a.x) + blockIdx.x * a.x_stride;
  for (int64_t k = 8 * threadIdx.x; k < a.padded; k += 8 * blockDim.x)
    store_arranged(a, blockIdx.x, k, k < a.in_features ? *reinterpret_cast<const uint4*>(x + k) : uint4{});
}

// Threads per block. With many rows, each thread gets several vectors, because other rows keep the GPU busy.
int threads_of(const RowArgs& a) {
  const int64_t vectors = (a.padded + 7) / 8, busy = int64_t(gpu().processors) * 1024;
  const int64_t thread_vectors = vectors * a.rows <= busy ? 1 : vectors * a.rows <= 2 * busy ? 2 : ROW_VECTORS;
  return int(std::min<int64_t>(MAX_ROW_THREADS, ((vectors + thread_vectors - 1) / thread_vectors + 31) / 32 * 32));
}

template <Rounding ROUNDING>
void start_rows(const RowArgs& a, cudaStream_t stream) {
  constexpr int PART_THREADS = 256;
  const int parts = int((a.padded + 8 * PART_THREADS - 1) / (8 * PART_THREADS));
  if constexpr (IN_PARTS<ROUNDING>)
    launch_early(prepare_row_kernel<ROUNDING>, a.rows * parts, PART_THREADS, 0, stream, a, parts);
  else launch_early(prepare_row_kernel<ROUNDING>, a.rows, threads_of(a), 0, stream, a, 1);
}

}  // namespace

bool prepares_in_registers(const RowArgs& a, bool rounded) {
  const bool groups = !rounded || a.group >= a.in_features || a.group == 32 || a.group == 64 || a.group == 128;
  return groups && a.padded <= 8 * ROW_VECTORS * MAX_ROW_THREADS;
}

void arrange_rows(const RowArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.in_features == 0) return;
  if (prepares_in_registers(args, false)) start_rows<Rounding::none>(args, stream);
  else launch_early(arrange_rows_kernel, args.rows, 512, 0, stream, args);
  check_launch("arrange_rows");
}

void round_rows(const RowArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.in_features == 0) return;
  const bool one_group = args.group >= args.in_features;
  if (!prepares_in_registers(args, true)) {
    launch_early(one_group ? round_rows_kernel<true> : round_rows_kernel<false>, args.rows, 512, 0, stream, args);
  } else if (one_group) start_rows<Rounding::row>(args, stream);
  else if (args.group == 32) start_rows<Rounding::groups_of_32>(args, stream);
  else if (args.group == 64) start_rows<Rounding::groups_of_64>(args, stream);
  else start_rows<Rounding::groups_of_128>(args, stream);
  check_launch("round_rows");
}

}  // namespace localllm::cuda
