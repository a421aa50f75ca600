// Products of one row with int8, int4 and fp8 weights (one_row.cuh). On Hopper, hopper.cu computes those with int4
// weights and rounded activations.
//
// Rounded activations are multiplied by int8 dot products (dp4a).
// int4: the four lanes of an output exchange their integer sums, so that lane t has the sum of chunk 4 w + t. These are the
// chunks of warp 4 w + t in small_batch/kernel.cuh, and their sums are added in the same order. int8: all sums are
// integers, which are exact in any order, so nothing is exchanged. So the result of a row has the same bits in every batch
// that small_batch/kernel.cuh computes. The other formats add in another order than small_batch/kernel.cuh.
#include "one_row.cuh"

namespace localllm::cuda {
namespace {

// N: vectors of activations per thread (see OneRow).
template <class F, int N>
__global__ void __launch_bounds__(CONSUMER_THREADS, RESIDENT_BLOCKS)
    one_row_kernel(const __grid_constant__ OneRowArgs d) {
  multiply_row<F, Lane<F, TEAM_WARPS>, OneRow<F, N>>(d);
}

template <class F>
void start(const ProductArgs& args, cudaStream_t stream) {
  const OneRowArgs d = row_arguments<F, Lane<F, TEAM_WARPS>>(args);
  const int64_t blocks = std::min<int64_t>(d.units, resident_blocks());
  auto launch = [&](auto n) {
    launch_early(one_row_kernel<F, n>, blocks, CONSUMER_THREADS, activation_bytes<F>(d), stream, d);
  };
  if constexpr (F::X_BYTES == 1) with_vectors<F, 1, 2, 4, MAX_VECTORS>(d, launch);
  else with_vectors<F, 2, 4, MAX_VECTORS>(d, launch);
  check_launch("linear");
}

}  // namespace

bool takes_one_row(const ProductArgs& args) {
  return with_one_row(args, [](auto) { return true; });
}

bool one_row(const ProductArgs& args, cudaStream_t stream) {
  return with_one_row(args, [&](auto format) {
    if (args.format != Weights::int4 || !one_row_hopper(args, stream)) start<decltype(format)>(args, stream);
    return true;
  });
}

}  // namespace localllm::cuda
