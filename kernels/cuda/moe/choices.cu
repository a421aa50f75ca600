// Products of a mixture of experts for few tokens, with quantised weights: each choice is a row with the weights of its
// expert (products/one_row/one_row.cuh).
#include "../products/one_row/one_row.cuh"

namespace localllm::cuda {
namespace {

constexpr int CHOICE_TEAM_WARPS = 2;  // fewer than TEAM_WARPS, because the experts' outputs have few chunks

template <class F>
using ChoiceLane = Lane<F, CHOICE_TEAM_WARPS>;

struct ChoiceRowArgs {
  OneRowArgs row;  // of choice 0 and expert 0
  const int32_t* experts;
  int choices_per_row;
  bool early;
};

// Blocks with blockIdx.y = c compute choice c.
template <class F, class X>
__global__ void __launch_bounds__(CONSUMER_THREADS, RESIDENT_BLOCKS)
    choice_kernel(const __grid_constant__ ChoiceRowArgs args) {
  if (!args.early) wait_for_previous();
  const int64_t choice = blockIdx.y, outputs = args.experts[choice] * args.row.args.out_features;
  OneRowArgs d = args.row;
  ProductArgs& a = d.args;
  auto add_bytes = [](auto& pointer, int64_t bytes) {
    using Pointer = std::remove_reference_t<decltype(pointer)>;
    if (pointer) pointer = Pointer(uintptr_t(pointer) + bytes);
  };
  auto bytes_of = [](Type type) { return type == Type::f32 ? 4 : 2; };
  add_bytes(a.x, choice / args.choices_per_row * a.x_stride * 2);
  add_bytes(a.out, choice * a.out_stride * bytes_of(a.out_type));
  add_bytes(a.weight, outputs * a.row_bytes);
  add_bytes(a.records, outputs * d.subgroups * F::RECORD_BYTES);
  add_bytes(a.scale, outputs * 4);
  add_bytes(a.bias, outputs * bytes_of(a.bias_type));
  a.norm = a.stream = nullptr;
  multiply_row<F, ChoiceLane<F>, X>(d);
}

template <class F, class X>
void start(const ChoiceArgs& args, const OneRowArgs& d, cudaStream_t stream) {
  const int64_t teams = ChoiceLane<F>::TEAMS;
  const int64_t blocks = std::clamp<int64_t>(resident_blocks() / args.choices, 1, (d.units + teams - 1) / teams);
  const ChoiceRowArgs rows{d, args.experts, int(args.choices_per_row), args.early};
  launch_early(choice_kernel<F, X>, dim3(blocks, args.choices), CONSUMER_THREADS, activation_bytes<F>(d), stream, rows);
  check_launch("choice_products");
}

}  // namespace

bool choice_products(const ChoiceArgs& args, cudaStream_t stream) {
  auto launch = [&](auto format) {
    using F = decltype(format);
    const OneRowArgs d = row_arguments<F, ChoiceLane<F>>(args.product);
    with_vectors<F, 2, MAX_VECTORS>(d, [&](auto n) { start<F, OneRow<F, n>>(args, d, stream); });
    return true;
  };
  const ProductArgs& a = args.product;
  if (a.format != Weights::mxfp4) return with_one_row(a, launch);
  return a.row_bytes * 2 == a.in_features && a.in_features <= MAX_IN_FEATURES && launch(Mxfp4Row{});
}

}  // namespace localllm::cuda
