// The op of all layers of a decode step. It checks shapes and dtypes; step/stack.py checks the weights, whose addresses it
// passes in `layers`.
#include "../../cpu/binding/checks.h"
#include "pages.h"
#include "stream.h"
#include "../step/step.h"

namespace localllm::cuda {
namespace {

constexpr const char* OP = "decoder_step";
constexpr int64_t FIELDS = sizeof(StepLayer) / sizeof(uint64_t);

// Checks the shape of a model and stores it in args.
void set_shape(StepArgs& args, const Tensor& layers, int64_t hidden, int64_t inner, int64_t heads, int64_t kv_heads,
               int64_t dim) {
  Argument table({OP, layers}, "layers", layers);
  table.shaped({ANY, FIELDS}).of(ScalarType::Long).dense();
  args.layers = table.data<StepLayer>();
  args.layer_count = (int)table.size(0);
  args.hidden = (int)check_range(OP, "hidden", hidden, 128, 1 << 16),
  args.inner = (int)check_range(OP, "inner", inner, 64, 1 << 18);
  args.heads = (int)check_range(OP, "heads", heads, 1, 1024),
  args.kv_heads = (int)check_range(OP, "kv_heads", kv_heads, 1, heads);
  args.dim = (int)check_range(OP, "dim", dim, 64, 128);
  if (args.layer_count < 1 || hidden % 128 || inner % 64 || (dim != 64 && dim != 128) || heads % kv_heads ||
      heads > 8 * kv_heads)
    refuse(OP, ": hidden ", hidden, ", inner ", inner, " and ", heads, " heads of ", dim, " for ", kv_heads,
           " kv heads are not supported");
}

int64_t shared_bytes_op(Tensor layers, int64_t hidden, int64_t inner, int64_t heads, int64_t kv_heads, int64_t dim) {
  Stream stream(layers);  // makes the device of `layers` current
  StepArgs args{};
  set_shape(args, layers, hidden, inner, heads, kv_heads, dim);
  return step_fits(args) ? step_shared(args) : 0;
}

void set_cache(StepArgs& args, const Tensor& keys, const Tensor& values) {
  Argument to({OP, keys}, "keys", keys), values_to({OP, keys}, "values", values);
  to.shaped({args.layer_count, ANY, ANY, args.kv_heads, args.dim}).of(ScalarType::BFloat16).dense();
  values_to.shaped({args.layer_count, to.size(1), to.size(2), args.kv_heads, args.dim}).of(ScalarType::BFloat16).dense();
  int64_t size = to.size(2);
  if (size < 1 || size & (size - 1)) refuse(OP, ": pages of ", size, " positions, a power of two expected");
  args.keys = to.data();
  args.values = values_to.data();
  args.limit = to.size(1) * size;
  if (args.limit > INT32_MAX) refuse(OP, ": too many pages");
  args.head_stride = args.dim;
  args.slot_stride = args.kv_heads * args.dim;
  args.layer_stride = args.limit * args.slot_stride;
  while (int64_t{1} << args.page_shift < size) args.page_shift++;
}

void step_op(Tensor x_out, Tensor stream_out, Tensor x, Tensor stream, Tensor layers, Tensor shared, Tensor cos,
             Tensor sin, Tensor slots, Tensor context_lens, Tensor page_table, Tensor keys, Tensor values,
             int64_t inner, int64_t heads, int64_t gate, double eps, double offset, double scale) {
  Op op(OP, x);
  Argument from(op, "x", x), before(op, "stream", stream), to(op, "x_out", x_out), after(op, "stream_out", stream_out);
  from.shaped({1, ANY}).of(ScalarType::BFloat16).dense();
  const int64_t hidden = from.size(1);
  for (Argument* vector : {&before, &to, &after}) vector->shaped({1, hidden}).of(ScalarType::BFloat16).dense();
  StepArgs args{};
  set_shape(args, layers, hidden, inner, heads, keys.size(3), keys.size(4));
  args.gate = (Activation)check_range(OP, "gate", gate, 0, 2);
  args.x = from.data();
  args.stream = before.data();
  args.x_out = to.data();
  args.stream_out = after.data();
  Argument c(op, "cos", cos), s(op, "sin", sin), slot_ids(op, "slots", slots),
      contexts(op, "context_lens", context_lens);
  args.cos = c.shaped({1, args.dim / 2}).of(ScalarType::Float).dense().data<float>();
  args.sin = s.shaped({1, args.dim / 2}).of(ScalarType::Float).dense().data<float>();
  args.slot = slot_ids.shaped({1}).of(ScalarType::Long).dense().data<int64_t>();
  args.context = contexts.shaped({1}).of(ScalarType::Int).dense().data<int32_t>();
  Argument pages(op, "page_table", page_table), memory(op, "shared", shared);
  args.page_table = pages.shaped({1, ANY}).of(ScalarType::Int).dense_rows().data<int32_t>();
  set_cache(args, keys, values);
  args.eps = (float)eps;
  args.offset = (float)offset;
  args.scale = (float)scale;
  args.shared = memory.shaped({ANY}).of(ScalarType::Byte).dense().data();
  const std::pair<const char*, const Tensor*> aligned_tensors[] = {
      {"x_out", &x_out},   {"stream_out", &stream_out}, {"x", &x},     {"stream", &stream},
      {"layers", &layers}, {"shared", &shared},         {"cos", &cos}, {"sin", &sin},
      {"keys", &keys},     {"values", &values}};
  for (auto& [name, tensor] : aligned_tensors) refuse_unaligned(OP, *tensor, name);
  Stream on(x);
  if (!step_fits(args)) refuse(OP, ": this GPU has too little shared memory for this model");
  if (memory.size(0) < step_shared(args)) refuse(OP, ": shared has ", memory.size(0), " bytes, too few");
  step(args, on);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  library.def(
      "decoder_step(Tensor(a!) x_out, Tensor(b!) stream_out, Tensor x, Tensor stream, Tensor layers, Tensor(c!) shared, "
      "Tensor cos, Tensor sin, Tensor slots, Tensor context_lens, Tensor page_table, Tensor(d!) keys, "
      "Tensor(e!) values, int inner, int heads, int gate, float eps, float offset, float scale) -> ()");
  // Bytes of `shared`, which must be zeros before the first step; 0 if this GPU does not support the model.
  library.def(
      "decoder_step_shared_bytes(Tensor layers, int hidden, int inner, int heads, int kv_heads, int dim) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) {
  library.impl("decoder_step", TORCH_BOX(&step_op));
  library.impl("decoder_step_shared_bytes", TORCH_BOX(&shared_bytes_op));
}

}  // namespace localllm::cuda
