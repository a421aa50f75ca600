// Rounds activations to int8, with a scale per row or per group of inputs. One block per row. Used where it would be
// slower to round the activations in every block of the product (prepared_rows.cuh).
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

template <class T>
__global__ void round_rows(int8_t* out, float* scales, const T* x, int in_features, int padded, int64_t x_stride,
                           int group, int subgroup) {
  launch_dependents();
  wait_for_previous();
  const T* row = x + blockIdx.x * x_stride;
  int8_t* to = out + int64_t(blockIdx.x) * padded;
  // A group of inputs starts at `from`. `step` threads round it: the whole block if there is one group, else a warp.
  // `first` is the index of this thread among these threads.
  bool one_group = group >= in_features;
  int first = one_group ? threadIdx.x : threadIdx.x % 32, step = one_group ? blockDim.x : 32, warps = blockDim.x / 32;
  for (int from = one_group ? 0 : int(threadIdx.x / 32) * group; from < in_features;
       from += one_group ? in_features : warps * group) {
    int end = min(in_features, from + group);
    uint32_t largest = 0;
    for (int k = from + first; k < end; k += step) largest = max(largest, __float_as_uint(fabsf(to_float(row[k]))));
    largest = one_group ? largest_of_block(largest) : __reduce_max_sync(0xffffffffu, largest);
    float limit = __uint_as_float(largest), factor = __fdiv_rn(127.0f, limit);
    for (int k = from + first; k < min(padded, from + (one_group ? padded : group)); k += step)
      to[k] = k < end && limit != 0.0f ? int8_t(__float2int_rn(__fmul_rn(to_float(row[k]), factor))) : int8_t(0);
    int subgroups = subgroup ? (in_features + subgroup - 1) / subgroup : 1;
    for (int s = subgroup ? from / subgroup + first : first; s < (subgroup ? (end + subgroup - 1) / subgroup : 1);
         s += step)
      scales[int64_t(blockIdx.x) * subgroups + s] = __fdiv_rn(limit, 127.0f);
  }
}

}  // namespace

void round_rows(const RoundArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.in_features == 0) return;
  with_type(args.type, [&](auto t) {
    using T = decltype(t);
    launch_early(round_rows<T>, args.rows, args.in_features >= 4096 ? 1024 : 256, 0, stream, args.out, args.scales,
                 static_cast<const T*>(args.x), int(args.in_features), int(args.padded), args.x_stride, int(args.group),
                 int(args.subgroup));
  });
  check_launch("round_rows");
}

}  // namespace localllm::cuda
