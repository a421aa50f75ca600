// A decoder layer as one op: checks the arguments of all its kernels and places their outputs in shared memory.
#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "dispatch.h"
#include "layer.h"
#include "team.h"

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

const Tensor& item(const std::vector<Tensor>& tensors, size_t index, const char* name, size_t least) {
  if (tensors.size() < least) refuse(OP, ": ", name, " has ", tensors.size(), " tensors, ", least, " expected");
  return tensors[index];
}

// The arguments of one of the four products. The caller sets the pointers to x, out and shared memory later.
LinearArgs product(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                   const std::vector<int64_t>& formats, const std::vector<int64_t>& groups, size_t index, bool wide,
                   Type type, int64_t rows, int64_t outs, int64_t ins) {
  LinearArgs args{};
  args.format = (Format)cast(OP, "a format", formats[index], 0, 5);
  args.wide = wide && args.format == Format::int4;
  args.group = check_group(OP, args.format, ins, groups[index]);
  Argument packed(OP, "one of weights", item(weights, index, "weights", 4));
  check_packed(OP, packed, args.format, outs, ins, args.group);
  args.weight = packed.data();
  Argument bias(OP, "one of biases", item(biases, index, "biases", 4));
  if (bias.count()) args.bias = bias.shaped({outs}).of(ScalarType::Float).dense().data<float>();
  args.out_type = args.x_type = type;
  args.rows = rows;
  args.outs = outs;
  args.ins = ins;
  args.x_stride = ins;
  args.out_stride = outs;
  return args;
}

struct Call {
  LayerArgs args;
  const Variant* variant;
};

void layer_on_variant(const Call& call, const Worker& worker) { layer(*call.variant, call.args, worker); }

void layer_op(Tensor x, Tensor stream, std::vector<Tensor> norms, std::vector<Tensor> norms_of_heads,
              std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<int64_t> formats,
              std::vector<int64_t> groups, bool wide, Tensor cos, Tensor sin, Tensor slots, Tensor key_pages,
              Tensor value_pages, Tensor row_starts, Tensor context_lens, Tensor page_table,
              std::optional<Tensor> sinks, int64_t heads, int64_t inner, int64_t gate, int64_t rotation,
              int64_t window, double eps, double offset, double scale, double soft_cap) {
  Argument in(OP, "x", x), residual(OP, "stream", stream);
  in.shaped({ANY, ANY}).dense();
  int64_t tokens = in.size(0), hidden = in.size(1);
  Type type = in.number();
  if (residual.shaped({tokens, hidden}).dense().number() != type) refuse(OP, ": x and stream are of different types");
  cast(OP, "heads", heads, 1, 1 << 20);
  cast(OP, "inner", inner, 1, INT32_MAX / 2);
  if (formats.size() != 4 || groups.size() != 4) refuse(OP, ": four formats and four groups expected");

  Argument keys(OP, "key_pages", key_pages), values(OP, "value_pages", value_pages), at(OP, "slots", slots);
  at.shaped({tokens}).of(ScalarType::Long).below(cache_slots(OP, keys, values, ANY, ANY));
  int64_t kv_heads = keys.size(2), dim = keys.size(3);
  int64_t qkv_width = (heads + 2 * kv_heads) * dim;

  Call call{};
  call.variant = &variant();
  LayerArgs& args = call.args;
  auto norm = [&](NormArgs& to, size_t index) {
    Argument weight(OP, "one of norms", item(norms, index, "norms", 2));
    to.weight = weight.shaped({hidden}).dense().data();
    to.weight_type = weight.number();
    to.type = type;
    to.rows = tokens;
    to.heads = 1;
    to.dim = to.x_stride = to.out_stride = hidden;
    to.eps = (float)eps;
    to.offset = (float)offset;
  };
  norm(args.before_attention, 0);
  norm(args.before_mlp, 1);
  if (norms.size() > 2) {
    item(norms, 3, "norms", 4);
    norm(args.after_attention, 2);
    norm(args.after_mlp, 3);
  }
  auto linear = [&](size_t index, int64_t outs, int64_t ins) {
    return product(weights, biases, formats, groups, index, wide, type, tokens, outs, ins);
  };
  args.qkv = linear(0, qkv_width, hidden);
  args.out = linear(1, hidden, heads * dim);
  args.gate_up = linear(2, 2 * inner, hidden);
  args.down = linear(3, hidden, inner);

  AppendArgs& append = args.append;
  Argument cosines(OP, "cos", cos), sines(OP, "sin", sin);
  append.half = rotation_half(OP, cosines, sines, tokens, dim);
  append.type = type;
  append.cache_type = keys.number();
  append.cos = cosines.data<float>();
  append.sin = sines.data<float>();
  append.rotation = (Rotation)cast(OP, "rotation", rotation, 0, 1);
  append.slots = at.data<int64_t>();
  append.key_pages = keys.data();
  append.value_pages = values.data();
  append.tokens = tokens;
  append.heads = heads;
  append.kv_heads = kv_heads;
  append.dim = dim;
  append.stride = qkv_width;
  append.eps = (float)eps;
  append.offset = (float)offset;
  if (!norms_of_heads.empty()) head_norms(OP, append, &item(norms_of_heads, 0, "head_norms", 2), &norms_of_heads[1]);

  AttentionArgs& attention = args.attention;
  attention.type = type;
  attention.cache_type = keys.number();
  attention.key_pages = keys.data();
  attention.value_pages = values.data();
  attention.tokens = tokens;
  attention.heads = heads;
  attention.kv_heads = kv_heads;
  attention.dim = dim;
  attention.query_stride = qkv_width;
  attention.page_size = keys.size(1);
  attention_rows(OP, attention, keys.size(0), row_starts, context_lens, page_table, sinks, scale, window, soft_cap);
  if (tokens == 0) return;

  ActivationArgs& gated = args.gate;
  gated.type = type;
  gated.kind = (Activation)cast(OP, "gate", gate, 0, 2);
  gated.rows = tokens;
  gated.dim = gated.out_stride = inner;
  gated.x_stride = 2 * inner;

  int64_t size = type == Type::f32 ? 4 : 2;
  Layout layout;
  int64_t normed = layout.add(tokens * hidden * size);
  int64_t qkv = layout.add(tokens * qkv_width * size);
  int64_t attended = layout.add(tokens * heads * dim * size);
  int64_t gate_up = layout.add(tokens * 2 * inner * size);
  int64_t activated = layout.add(tokens * inner * size);
  Run run(INT64_MAX);  // a layer always uses the whole team
  char* memory = (char*)run.shared(layout.bytes() + layer_shared(*call.variant, args, run.workers()));
  void* kernel_memory = memory + layout.bytes();

  args.before_attention.x = in.data();
  args.before_attention.residual = residual.data();
  args.before_attention.out = memory + normed;
  args.qkv.x = memory + normed;
  args.qkv.out = append.qkv = memory + qkv;
  attention.query = memory + qkv;
  attention.out = memory + attended;
  args.out.x = memory + attended;
  args.out.out = in.data();
  args.after_attention.x = args.after_attention.out = in.data();
  args.before_mlp.x = in.data();
  args.before_mlp.residual = residual.data();
  args.before_mlp.out = memory + normed;
  args.gate_up.x = memory + normed;
  args.gate_up.out = memory + gate_up;
  gated.x = memory + gate_up;
  gated.out = memory + activated;
  args.down.x = memory + activated;
  args.down.out = in.data();
  args.after_mlp.x = args.after_mlp.out = in.data();
  args.qkv.shared = args.out.shared = args.gate_up.shared = args.down.shared = attention.shared = kernel_memory;
  run.all(layer_on_variant, call);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(localllm, CPU, library) { library.impl("layer", TORCH_BOX(&layer_op)); }

}  // namespace localllm
