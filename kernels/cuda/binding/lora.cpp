// The ops lora_shrink and lora_expand: checks of their arguments. lora/products.h describes the arguments.
#include "../../cpu/binding/checks.h"
#include "../../cpu/binding/lora_arguments.h"
#include "../lora/products.h"
#include "stream.h"

namespace localllm::cuda {
namespace {

// The arguments that both ops share.
LoraStep step_of(const Op& op, const Tensor& inner, const Tensor& a, const Tensor& b,
                 const std::vector<int64_t>& widths, const Tensor& slots, const Tensor& scales, const Tensor& order,
                 const Tensor& starts, const Tensor& tile_slots, int64_t chunk) {
  LoraStep step{};
  step.args = lora_factors(op, a, b, widths);
  step.slot_count = Argument(op, "lora_a", a).size(0);
  Argument products(op, "inner", inner), token_slots(op, "slots", slots);
  products.shaped({ANY, ANY, step.args.slices * step.args.rank}).of(ScalarType::Float).dense();
  step.shares = (int)check_range(op, "the number of shares", products.size(0), 1, INT32_MAX);
  step.tokens = products.size(1);
  step.args.inner = products.data<float>();
  step.slots = token_slots.shaped({step.tokens}).of(ScalarType::Int).dense().data<int32_t>();
  step.chunk = (int)check_range(op, "chunk", chunk, 1, INT32_MAX);
  lora_tiles(op, step.args, step.slot_count, step.tokens, scales, order, starts, tile_slots);
  return step;
}

void lora_shrink_op(Tensor inner, Tensor x, Tensor a, Tensor b, std::vector<int64_t> widths, Tensor slots,
                    Tensor scales, Tensor order, Tensor starts, Tensor tile_slots, int64_t chunk) {
  const Op op("lora_shrink", inner);
  LoraStep step = step_of(op, inner, a, b, widths, slots, scales, order, starts, tile_slots, chunk);
  Argument from(op, "x", x);
  from.shaped({step.tokens, step.args.in_features}).dense_rows();
  if (from.number() != step.args.type) refuse(op.name, ": x and lora_a are of different types");
  step.args.x = from.data();
  step.args.x_stride = from.stride();
  lora_shrink(step, Stream(inner));
}

void lora_expand_op(Tensor out, Tensor inner, Tensor a, Tensor b, std::vector<int64_t> widths, Tensor slots,
                    Tensor scales, Tensor order, Tensor starts, Tensor tile_slots, int64_t chunk, bool adds) {
  const Op op("lora_expand", out);
  LoraStep step = step_of(op, inner, a, b, widths, slots, scales, order, starts, tile_slots, chunk);
  Argument to(op, "out", out);
  to.shaped({step.tokens, Argument(op, "lora_b", b).size(1)}).written_rows();
  step.args.out = to.data();
  step.args.out_type = to.number();
  step.args.out_stride = to.stride();
  step.adds = adds;
  lora_expand(step, Stream(out));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  library.def(
      "lora_shrink(Tensor(a!) inner, Tensor x, Tensor lora_a, Tensor lora_b, int[] widths, Tensor slots, "
      "Tensor scales, Tensor order, Tensor starts, Tensor tile_slots, int chunk) -> ()");
  library.def(
      "lora_expand(Tensor(a!) out, Tensor inner, Tensor lora_a, Tensor lora_b, int[] widths, Tensor slots, "
      "Tensor scales, Tensor order, Tensor starts, Tensor tile_slots, int chunk, bool adds) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) {
  library.impl("lora_shrink", TORCH_BOX(&lora_shrink_op));
  library.impl("lora_expand", TORCH_BOX(&lora_expand_op));
}

}  // namespace localllm::cuda
