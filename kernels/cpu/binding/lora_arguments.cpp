#include "lora_arguments.h"

#include "checks.h"

namespace localllm {

LoraArgs lora_factors(const Op& op, const Tensor& a, const Tensor& b, const std::vector<int64_t>& widths) {
  Argument down(op, "lora_a", a), up(op, "lora_b", b);
  int64_t slices = check_range(op, "the number of slices", widths.size(), 1, MAX_LORA_SLICES);
  LoraArgs args{};
  int64_t out_features = 0;
  for (int64_t slice = 0; slice < slices; slice++) {
    args.widths[slice] = check_range(op, "a width", widths[slice], 0, INT32_MAX);
    out_features += widths[slice];
  }
  up.shaped({ANY, out_features, ANY}).dense_rows();
  down.shaped({up.size(0), slices * up.size(2), ANY}).dense_rows();
  if (down.number() != up.number()) refuse(op.name, ": lora_a and lora_b are of different types");
  args.a = down.data();
  args.b = up.data();
  args.type = up.number();
  args.in_features = down.size(2);
  args.rank = up.size(2);
  args.slices = slices;
  args.a_stride = down.stride();
  args.b_stride = up.stride();
  return args;
}

void lora_tiles(const Op& op, LoraArgs& args, int64_t slots, int64_t tokens, const Tensor& scales, const Tensor& order,
                const Tensor& starts, const Tensor& tile_slots) {
  Argument factors(op, "scales", scales), sorted(op, "order", order), bounds(op, "starts", starts);
  Argument slot_ids(op, "tile_slots", tile_slots);
  factors.shaped({tokens}).of(ScalarType::Float).dense();
  sorted.shaped({tokens}).of(ScalarType::Int).below(tokens);
  slot_ids.shaped({ANY}).of(ScalarType::Int).below(slots);
  bounds.shaped({slot_ids.size(0) + 1}).of(ScalarType::Int).below(tokens + 1);
  args.scales = factors.data<float>();
  args.order = sorted.data<int32_t>();
  args.starts = bounds.data<int32_t>();
  args.tile_slots = slot_ids.data<int32_t>();
  args.tiles = slot_ids.size(0);
  for (int64_t tile = 0; !op.cuda && tile < args.tiles; tile++)
    if (args.starts[tile] > args.starts[tile + 1]) refuse(op.name, ": starts goes down after tile ", tile);
}

int64_t lora_inner(const LoraArgs& args, int64_t tokens) { return tokens * args.slices * args.rank; }

}  // namespace localllm
