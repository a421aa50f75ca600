// Products of a mixture of experts for few tokens, with quantised weights: each choice is a row with the weights of its
// expert (one_row.cuh).
#include "choice_formats.cuh"
#include "one_row.cuh"

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
    choice_kernel(const __grid_constant__ ChoiceRowArgs all) {
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
  multiply_row<F, ChoiceLane<F>, X>(d);
}

template <class F, class X>
void start(const ChoiceArgs& args, const OneRowArgs& d, cudaStream_t stream) {
  const int64_t teams = ChoiceLane<F>::TEAMS;
  const int64_t blocks = std::clamp<int64_t>(resident_blocks() / args.choices, 1, (d.units + teams - 1) / teams);
  const ChoiceRowArgs all{d, args.experts, int(args.choices_per_row), args.early};
  launch_early(choice_kernel<F, X>, dim3(blocks, args.choices), CONSUMER_THREADS, shared_of<F>(d), stream, all);
  check_launch("choice_products");
}

// Calls call(format) if the kernel supports the product with activations that are not rounded; else returns false.
template <class Call>
bool with_floats(const ProductArgs& args, Call&& call) {
  if (args.in_features > MAX_IN_FEATURES || !aligned({args.records}, {})) return false;
  const bool power = (args.group & (args.group - 1)) == 0;
  switch (args.format) {
    case Weights::fp8:
      if (!args.records) return call(E4m3Row<false>{});
      return power && args.group >= E4m3Row<true>::CHUNK && call(E4m3Row<true>{});
    case Weights::int4_wide:
      if (args.row_bytes != round_up(args.in_features, 128) / 2) return false;
      switch (args.group) {
        case 32: return call(WideHalfBytes<4>{});
        case 64: return call(WideHalfBytes<2>{});
        case 128: return call(WideHalfBytes<1>{});
      }
      return false;
    default: return false;
  }
}

}  // namespace

bool choice_products(const ChoiceArgs& args, cudaStream_t stream) {
  auto arguments = [&](auto format) {
    return row_arguments<decltype(format), ChoiceLane<decltype(format)>>(args.product);
  };
  auto rounded = [&](auto format) {
    using F = decltype(format);
    const OneRowArgs d = arguments(format);
    with_vectors<F>(d, [&](auto n) { start<F, OneRow<F, n>>(args, d, stream); });
    return true;
  };
  auto floats = [&](auto format) {
    using F = decltype(format);
    start<F, FloatRow<F>>(args, arguments(format), stream);
    return true;
  };
  return with_rounded(args.product, rounded) || with_floats(args.product, floats);
}

}  // namespace localllm::cuda
