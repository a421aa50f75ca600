// A decoder layer as one op: checks the arguments of all its kernels and places their outputs in shared memory.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "checks.h"
#include "../isa/dispatch.h"
#include "../step/layer.h"
#include "layer.h"
#include "lora_arguments.h"
#include "../team/team.h"

namespace localllm {
namespace {

// Offsets of the intermediate tensors in the shared memory, 64-byte aligned.
class Layout {
 public:
  int64_t add(int64_t bytes) {
    int64_t start = end_;
    end_ += round_up(bytes, 64);
    return start;
  }
  int64_t bytes() const { return end_; }

 private:
  int64_t end_ = 0;
};

const char* OP = "layer";

const Tensor& item(const std::vector<Tensor>& tensors, size_t index, const char* name, size_t min_count) {
  if (tensors.size() < min_count) refuse(OP, ": ", name, " has ", tensors.size(), " tensors, ", min_count, " expected");
  return tensors[index];
}

// The arguments of one of the products. The caller sets the pointers to x, out and shared memory later.
LinearArgs product(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                   const std::vector<int64_t>& formats, const std::vector<int64_t>& groups, size_t index, bool wide,
                   Type type, int64_t rows, int64_t out_features, int64_t in_features) {
  LinearArgs args{};
  args.format = (Format)check_range(OP, "a format", formats[index], 0, FORMATS - 1);
  args.wide = wide && args.format == Format::int4;
  args.group = check_group(OP, args.format, in_features, groups[index]);
  Argument packed(OP, "one of weights", item(weights, index, "weights", formats.size()));
  check_packed(OP, packed, args.format, out_features, in_features, args.group);
  args.weight = packed.data();
  Argument bias(OP, "one of biases", item(biases, index, "biases", formats.size()));
  if (bias.count()) args.bias = bias.shaped({out_features}).of(ScalarType::Float).dense().data<float>();
  args.out_type = args.x_type = type;
  args.rows = rows;
  args.out_features = out_features;
  args.in_features = in_features;
  args.x_stride = in_features;
  args.out_stride = out_features;
  return args;
}

// The sizes of a layer and of the step that it computes.
struct LayerShape {
  Type type;  // element type of x and of all intermediate tensors
  int64_t tokens, hidden, heads, kv_heads, dim, inner;

  int64_t qkv_width() const { return (heads + 2 * kv_heads) * dim; }
  int64_t element_bytes() const { return type == Type::f32 ? 4 : 2; }
};

struct Call {
  LayerArgs args;
  const Variant* variant;
};

void layer_on_variant(const Call& call, const Worker& worker) { layer(*call.variant, call.args, worker); }

NormArgs norm(const std::vector<Tensor>& norms, size_t index, size_t min_count, const LayerShape& shape, double eps,
              double offset) {
  Argument weight(OP, "one of norms", item(norms, index, "norms", min_count));
  NormArgs args{};
  args.weight = weight.shaped({shape.hidden}).dense().data();
  args.weight_type = weight.number();
  args.type = shape.type;
  args.rows = shape.tokens;
  args.heads = 1;
  args.dim = args.x_stride = args.out_stride = shape.hidden;
  args.eps = (float)eps;
  args.offset = (float)offset;
  return args;
}

AppendArgs append(const LayerShape& shape, const Argument& keys, const Argument& values, const Argument& slots,
                  const Tensor& cos, const Tensor& sin, int64_t rotation, const std::vector<Tensor>& head_norm_weights,
                  double eps, double offset) {
  Argument cosines(OP, "cos", cos), sines(OP, "sin", sin);
  AppendArgs args{};
  args.half = rotation_half(OP, cosines, sines, shape.tokens, shape.dim);
  args.type = shape.type;
  args.cache_type = keys.number();
  args.cos = cosines.data<float>();
  args.sin = sines.data<float>();
  args.rotation = (Rotation)check_range(OP, "rotation", rotation, 0, 1);
  args.slots = slots.data<int64_t>();
  args.key_pages = keys.data();
  args.value_pages = values.data();
  args.tokens = shape.tokens;
  args.heads = shape.heads;
  args.kv_heads = shape.kv_heads;
  args.dim = shape.dim;
  args.stride = shape.qkv_width();
  args.eps = (float)eps;
  args.offset = (float)offset;
  if (!head_norm_weights.empty()) {
    const Tensor& query_norm = item(head_norm_weights, 0, "head_norms", 2);
    head_norms(OP, args, &query_norm, &head_norm_weights[1]);
  }
  return args;
}

// The arguments of attention except those that attention_rows sets.
AttentionArgs attention(const LayerShape& shape, const Argument& keys, const Argument& values) {
  AttentionArgs args{};
  args.type = shape.type;
  args.cache_type = keys.number();
  args.key_pages = keys.data();
  args.value_pages = values.data();
  args.tokens = shape.tokens;
  args.heads = shape.heads;
  args.kv_heads = shape.kv_heads;
  args.dim = args.value_dim = shape.dim;
  args.query_stride = shape.qkv_width();
  args.page_size = keys.size(1);
  return args;
}

ActivationArgs activation(const LayerShape& shape, int64_t gate) {
  ActivationArgs args{};
  args.type = shape.type;
  args.kind = (Activation)check_range(OP, "gate", gate, 0, 2);
  args.rows = shape.tokens;
  args.dim = args.out_stride = shape.inner;
  args.x_stride = 2 * shape.inner;
  return args;
}

// The LoRA arguments of a step: the factors of all projections, with the widths of all their slices in one list,
// and the tiles. Without tiles no token has an adapter.
struct LayerLora {
  const std::vector<Tensor>& a;
  const std::vector<Tensor>& b;
  const std::vector<int64_t>& widths;
  const std::optional<Tensor>& scales;
  const std::optional<Tensor>& order;
  const std::optional<Tensor>& starts;
  const std::optional<Tensor>& slots;
};

// Sets the LoRA arguments of each projection except the pointers to x, out and the inner products.
void lora_arguments(LayerArgs& args, const LayerLora& lora, const LayerShape& shape) {
  if (!lora.slots) return;
  if (!lora.scales || !lora.order || !lora.starts) refuse(OP, ": lora_scales, lora_order or lora_starts is missing");
  const LinearArgs* products[] = {&args.qkv, &args.out, &args.gate_up, &args.down};
  LoraArgs* targets[] = {&args.qkv_lora, &args.out_lora, &args.gate_up_lora, &args.down_lora};
  auto width = lora.widths.begin();
  size_t count = args.has_mlp ? 4 : 2;
  for (size_t index = 0; index < count; index++) {
    const Tensor& a = item(lora.a, index, "lora_a", count);
    const Tensor& b = item(lora.b, index, "lora_b", count);
    int64_t slices = a.dim() == 3 && b.dim() == 3 && b.size(2) > 0 ? a.size(1) / b.size(2) : 0;
    if (slices > lora.widths.end() - width) refuse(OP, ": lora_widths has too few widths");
    LoraArgs& target = *targets[index];
    target = lora_factors(OP, a, b, {width, width + slices});
    width += slices;
    lora_tiles(OP, target, a.size(0), shape.tokens, *lora.scales, *lora.order, *lora.starts, *lora.slots);
    const LinearArgs& product = *products[index];
    if (target.type != shape.type) refuse(OP, ": x and lora_a are of different types");
    if (a.size(2) != product.in_features || b.size(1) != product.out_features)
      refuse(OP, ": LoRA factors of ", a.size(2), " inputs and ", b.size(1), " outputs, ", product.in_features,
             " inputs and ", product.out_features, " outputs expected");
    target.out_type = shape.type;
    target.x_stride = product.x_stride;
    target.out_stride = product.out_stride;
  }
}

// The LoRA products of a projection read its inputs and add to its outputs.
void connect_lora(LoraArgs& lora, const LinearArgs& linear, float* inner) {
  lora.x = linear.x;
  lora.out = linear.out;
  lora.inner = inner;
}

// Connects the kernels: the output of each is the input of the next. Intermediate tensors and the memory that the
// kernels share are in the shared memory of `run`.
void connect(Call& call, Run& run, const LayerShape& shape, void* x, void* stream) {
  LayerArgs& args = call.args;
  int64_t row_bytes = shape.tokens * shape.element_bytes();  // bytes of one column of a tensor, for all tokens
  Layout layout;
  int64_t normed = layout.add(row_bytes * shape.hidden);
  int64_t qkv = layout.add(row_bytes * shape.qkv_width());
  int64_t attended = layout.add(row_bytes * shape.heads * shape.dim);
  int64_t gate_up = layout.add(row_bytes * 2 * shape.inner);
  int64_t activated = layout.add(row_bytes * shape.inner);
  int64_t lora_elements = 0;
  for (const LoraArgs* lora : {&args.qkv_lora, &args.out_lora, &args.gate_up_lora, &args.down_lora})
    lora_elements = std::max(lora_elements, lora_inner(*lora, shape.tokens));
  int64_t inner_products = layout.add(lora_elements * sizeof(float));
  char* memory = (char*)run.shared(layout.bytes() + layer_shared(*call.variant, args, run.workers()));
  void* kernel_memory = memory + layout.bytes();

  args.before_attention.x = x;
  args.before_attention.residual = stream;
  args.before_attention.out = memory + normed;
  args.qkv.x = memory + normed;
  args.qkv.out = args.append.qkv = memory + qkv;
  args.attention.query = memory + qkv;
  args.attention.out = memory + attended;
  args.out.x = memory + attended;
  args.out.out = x;
  args.after_attention.x = args.after_attention.out = x;
  args.before_mlp.x = x;
  args.before_mlp.residual = stream;
  args.before_mlp.out = args.has_mlp ? memory + normed : x;
  args.gate_up.x = memory + normed;
  args.gate_up.out = memory + gate_up;
  args.gate.x = memory + gate_up;
  args.gate.out = memory + activated;
  args.down.x = memory + activated;
  args.down.out = x;
  args.after_mlp.x = args.after_mlp.out = x;
  for (LinearArgs* linear : {&args.qkv, &args.out, &args.gate_up, &args.down}) linear->shared = kernel_memory;
  args.attention.shared = kernel_memory;
  float* products = (float*)(memory + inner_products);
  connect_lora(args.qkv_lora, args.qkv, products);
  connect_lora(args.out_lora, args.out, products);
  connect_lora(args.gate_up_lora, args.gate_up, products);
  connect_lora(args.down_lora, args.down, products);
}

}  // namespace

void layer_op(Tensor x, Tensor stream, std::vector<Tensor> norms, std::vector<Tensor> head_norm_weights,
              std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<int64_t> formats,
              std::vector<int64_t> groups, bool wide, Tensor cos, Tensor sin, Tensor slots, Tensor key_pages,
              Tensor value_pages, Tensor row_starts, Tensor context_lens, Tensor page_table,
              std::optional<Tensor> sinks, int64_t heads, int64_t inner, int64_t gate, int64_t rotation, int64_t window,
              double eps, double offset, double scale, double soft_cap, std::vector<Tensor> lora_a,
              std::vector<Tensor> lora_b, std::vector<int64_t> lora_widths, std::optional<Tensor> lora_scales,
              std::optional<Tensor> lora_order, std::optional<Tensor> lora_starts, std::optional<Tensor> lora_slots) {
  Argument in(OP, "x", x), residual(OP, "stream", stream);
  in.shaped({ANY, ANY}).dense();
  LayerShape shape{};
  shape.tokens = in.size(0);
  shape.hidden = in.size(1);
  shape.type = in.number();
  if (residual.shaped({shape.tokens, shape.hidden}).dense().number() != shape.type)
    refuse(OP, ": x and stream are of different types");
  shape.heads = check_range(OP, "heads", heads, 1, 1 << 20);
  bool has_mlp = formats.size() == 4;
  if ((!has_mlp && formats.size() != 2) || groups.size() != formats.size())
    refuse(OP, ": ", formats.size(), " formats and ", groups.size(), " groups, four each (two without the MLP) expected");
  shape.inner = has_mlp ? check_range(OP, "inner", inner, 1, INT32_MAX / 2) : 0;
  Argument keys(OP, "key_pages", key_pages), values(OP, "value_pages", value_pages), slot_ids(OP, "slots", slots);
  slot_ids.shaped({shape.tokens}).of(ScalarType::Long).below(cache_slots(OP, keys, values, ANY, ANY));
  shape.kv_heads = keys.size(2);
  shape.dim = keys.size(3);

  Call call{};
  call.variant = &variant();
  LayerArgs& args = call.args;
  args.has_mlp = has_mlp;
  args.before_attention = norm(norms, 0, 2, shape, eps, offset);
  args.before_mlp = norm(norms, 1, 2, shape, eps, offset);
  if (norms.size() > 2) {
    args.after_attention = norm(norms, 2, 4, shape, eps, offset);
    args.after_mlp = norm(norms, 3, 4, shape, eps, offset);
  }
  auto linear = [&](size_t index, int64_t out_features, int64_t in_features) {
    return product(weights, biases, formats, groups, index, wide, shape.type, shape.tokens, out_features, in_features);
  };
  args.qkv = linear(0, shape.qkv_width(), shape.hidden);
  args.out = linear(1, shape.hidden, shape.heads * shape.dim);
  if (has_mlp) {
    args.gate_up = linear(2, 2 * shape.inner, shape.hidden);
    args.down = linear(3, shape.hidden, shape.inner);
    args.gate = activation(shape, gate);
  }
  args.append = append(shape, keys, values, slot_ids, cos, sin, rotation, head_norm_weights, eps, offset);
  args.attention = attention(shape, keys, values);
  attention_rows(OP, args.attention, keys.size(0), row_starts, context_lens, page_table, sinks, scale, window, soft_cap);
  if (shape.tokens == 0) return;
  LayerLora lora{lora_a, lora_b, lora_widths, lora_scales, lora_order, lora_starts, lora_slots};
  lora_arguments(args, lora, shape);
  Run run(INT64_MAX);  // a layer always uses the whole team
  connect(call, run, shape, in.data(), residual.data());
  run.all(layer_on_variant, call);
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CPU, library) { library.impl("layer", TORCH_BOX(&layer_op)); }

}  // namespace localllm
