// Prepares activations of a product in a separate kernel: rounds them to int8, with a scale per row or per group of
// inputs, and reorders inputs. One block per row. Used where it would be slower to prepare the activations in every block
// of the product (prepared_rows.cuh).
#include "linear.h"
#include "prepared_rows.cuh"

namespace localllm::cuda {

namespace {

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
  for (int64_t from = ONE_GROUP ? 0 : threadIdx.x / 32 * size; from < a.in_features; from += ONE_GROUP ? size : warps * size) {
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
      store(a, static_cast<int8_t*>(a.out) + row * a.padded, k, k < end ? rounded_to_int8(values, limit) : uint2{});
    }
    const int64_t last = a.subgroup ? (end + a.subgroup - 1) / a.subgroup : 1;
    for (int64_t s = (a.subgroup ? from / a.subgroup : 0) + first; s < last; s += threads)
      a.scales[a.scale_pitch ? s * a.scale_pitch + row : row * subgroups + s] = __fdiv_rn(limit, 127.0f);
  }
}

__global__ void arrange_rows_kernel(const __grid_constant__ RowArgs a) {
  launch_dependents();
  wait_for_previous();
  const auto* x = static_cast<const __nv_bfloat16*>(a.x) + blockIdx.x * a.x_stride;
  auto* out = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(a.out) + blockIdx.x * a.padded);
  for (int64_t k = 8 * threadIdx.x; k < a.padded; k += 8 * blockDim.x) {
    const uint4 v = k < a.in_features ? *reinterpret_cast<const uint4*>(x + k) : uint4{};
    if (a.order == InputOrder::pairs) {
      uint32_t* to = out + k / 16 * 8 + k % 16 / 4;
      *reinterpret_cast<uint2*>(to) = {v.x, v.z};
      *reinterpret_cast<uint2*>(to + 4) = {v.y, v.w};
    } else {
      uint32_t* to = out + k / 32 * 16 + k % 32 / 8;
      to[0] = __byte_perm(v.x, v.z, 0x5410);
      to[4] = __byte_perm(v.x, v.z, 0x7632);
      to[8] = __byte_perm(v.y, v.w, 0x5410);
      to[12] = __byte_perm(v.y, v.w, 0x7632);
    }
  }
}

}  // namespace

void arrange_rows(const RowArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.in_features == 0) return;
  launch_early(arrange_rows_kernel, args.rows, args.in_features >= 4096 ? 512 : 128, 0, stream, args);
  check_launch("arrange_rows");
}

void round_rows(const RowArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.in_features == 0) return;
  const bool one_group = args.group >= args.in_features;
  const int threads = args.in_features >= 4096 ? 512 : 256;
  launch_early(one_group ? round_rows_kernel<true> : round_rows_kernel<false>, args.rows, threads, 0, stream, args);
  check_launch("round_rows");
}

}  // namespace localllm::cuda
