// Checks of the arguments of the ops small_batch, small_batch_lora, small_batch_fits, tiled_product, choice_products, widen
// and round_groups. products/product.h describes the arguments.
#include <vector>

#include "../../cpu/binding/checks.h"
#include "../device/counters.h"
#include "../products/product.h"
#include "pages.h"
#include "stream.h"

namespace localllm::cuda {
namespace {

constexpr const char* OP = "small_batch";
constexpr int64_t MAX_ROWS = 16, MAX_TILED_ROWS = 1 << 20, MAX_CHOICES = 65535;

bool has_dtype(const Tensor& tensor, ScalarType type) { return tensor.scalar_type() == type; }

// Checks weight, records and scale against the format, and stores them in args.
void set_weight(const char* op, ProductArgs& args, const Tensor& weight, const Optional& records, const Optional& scale) {
  Argument matrix({op, weight}, "weight", weight);
  matrix.shaped({args.out_features, ANY}).dense();
  refuse_unaligned(op, weight, "weight");
  args.weight = matrix.data();
  args.row_bytes = matrix.size(1) * matrix.bytes();
  const bool mxfp4 = args.format == Weights::mxfp4;
  int64_t min_bytes = args.format == Weights::bf16 ? args.in_features * 2
                      : mxfp4                      ? (args.in_features + 1) / 2
                      : args.format == Weights::int8 || args.format == Weights::fp8
                          ? args.in_features
                          : round_up(args.in_features, 128) / 2;
  if (args.row_bytes < min_bytes || args.row_bytes % 16 || args.row_bytes > 2 * min_bytes + 64)
    refuse(op, ": a row of weight has ", args.row_bytes, " bytes, at least ", min_bytes,
           " in multiples of 16 expected");
  if (scale)
    args.scale =
        Argument({op, weight}, "scale", *scale).shaped({args.out_features}).of(ScalarType::Float).dense().data<float>();
  bool fp8 = args.format == Weights::fp8, grouped = fp8 ? args.group < args.in_features : args.format >= Weights::int4;
  bool scaled = args.format == Weights::int8 || (fp8 && !grouped);
  if (grouped != records.has_value() || scaled != scale.has_value())
    refuse(op, ": records or scale do not fit this format");
  if (!grouped) return;
  if (args.group < 1 || (args.group < args.in_features && args.group % (fp8 ? 64 : 32)))
    refuse(op, ": groups of ", args.group, " inputs, a multiple of ", fp8 ? 64 : 32, " expected");
  if (mxfp4 && args.group != 32) refuse(op, ": groups of ", args.group, " inputs, 32 expected");
  const int64_t subgroup = record_inputs(args);
  Argument record_table({op, weight}, "records", *records);
  const int64_t subgroups = (args.in_features + subgroup - 1) / subgroup;
  if (mxfp4) record_table.shaped({args.out_features, subgroups}).of(ScalarType::Byte).dense();
  else record_table.shaped({(args.out_features + 7) / 8, subgroups, 8}).of(ScalarType::Int).dense();
  args.records = record_table.data();
}

void set_norm(ProductArgs& args, const Tensor& x, const Optional& stream, const Optional& stream_out,
              const Optional& norm, double eps, double offset) {
  if (!norm) {
    if (stream || stream_out) refuse(OP, ": stream and stream_out need a norm");
    return;
  }
  Argument weight({OP, x}, "norm", *norm);
  weight.shaped({args.in_features}).dense();
  args.norm = weight.data();
  args.norm_type = weight.number();
  args.eps = (float)eps;
  args.offset = (float)offset;
  if (stream.has_value() != stream_out.has_value()) refuse(OP, ": stream and stream_out must be given together");
  if (!stream) return;
  Argument before({OP, x}, "stream", *stream), after({OP, x}, "stream_out", *stream_out);
  before.shaped({args.rows, args.in_features}).of(ScalarType::BFloat16).dense();
  after.shaped({args.rows, args.in_features}).of(ScalarType::BFloat16).dense();
  refuse_unaligned(OP, *stream, "stream");
  refuse_unaligned(OP, *stream_out, "stream_out");
  args.stream = before.data();
  args.stream_out = after.data();
  if (args.stream == args.stream_out) refuse(OP, ": stream_out must not be the memory of stream");
}

// The numbers of a mixture of experts, and the last format and gate that its op supports; without one, each row is a
// choice of one expert.
struct Mixture {
  int64_t choices_per_row = 1, experts = 1;
  Weights last_format = Weights::fp8;
  ExpertGate last_gate = ExpertGate::gelu_tanh;
};

// The arguments of a product without a norm. In a mixture: those of choice 0 and expert 0, but `rows` rows of x.
ProductArgs product_arguments(const char* op, const Tensor& out, const Tensor& x, const Tensor& weight,
                              const Optional& records, const Optional& scale, const Optional& bias, int64_t format,
                              int64_t group, bool resident, int64_t gate, int64_t max_rows = MAX_ROWS,
                              Mixture mixture = {}) {
  Argument to({op, x}, "out", out), from({op, x}, "x", x);
  from.shaped({ANY, ANY}).of(ScalarType::BFloat16).dense_rows();
  to.shaped({from.size(0) * mixture.choices_per_row, ANY}).written_rows();
  check_range({op, x}, "format", format, 0, int64_t(mixture.last_format));
  check_range({op, x}, "gate", gate, -1, int64_t(mixture.last_gate));
  ProductArgs args{};
  args.format = (Weights)format;
  args.gated = gate >= 0;
  args.gate = args.gated ? (ExpertGate)gate : ExpertGate::silu;
  args.rows = from.size(0);
  args.in_features = from.size(1);
  args.out_features = to.size(1) * (args.gated ? 2 : 1) * mixture.experts;
  args.group = group;
  args.out = to.data();
  args.x = from.data();
  args.out_type = to.number();
  args.x_stride = from.stride();
  args.out_stride = to.stride();
  args.resident = resident;
  if (args.rows > max_rows) refuse(op, ": ", args.rows, " rows, no more than ", max_rows, " expected");
  if (args.in_features % 8 || args.x_stride % 8 || (uintptr_t)args.x % 16) refuse(op, ": x is not aligned to 16 bytes");
  if (args.gated && to.size(1) % 8) refuse(op, ": ", to.size(1), " gated outputs, a multiple of 8 expected");
  if (has_dtype(weight, ScalarType::BFloat16) != (args.format == Weights::bf16))
    refuse(op, ": weight has the wrong dtype");
  set_weight(op, args, weight, records, scale);
  if (bias) {
    Argument shift({op, x}, "bias", *bias);
    shift.shaped({args.out_features}).dense();
    args.bias = shift.data();
    args.bias_type = shift.number();
  }
  args.out_features /= mixture.experts;
  return args;
}

void multiply(ProductArgs& args, const Tensor& out, const Tensor& x) {
  Stream stream(out);
  Tensor shared = x;
  if (int64_t bytes = product_shared(args)) {
    shared = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
    args.shared = shared.data_ptr();
  }
  product(args, stream);
}

void small_batch_op(Tensor out, Tensor x, Tensor weight, Optional records, Optional scale, Optional bias,
                    int64_t format, int64_t group, bool resident, Optional stream, Optional stream_out, Optional norm,
                    double eps, double offset, int64_t gate) {
  ProductArgs args = product_arguments(OP, out, x, weight, records, scale, bias, format, group, resident, gate);
  set_norm(args, x, stream, stream_out, norm, eps, offset);
  multiply(args, out, x);
}

void tiled_product_op(Tensor out, Tensor x, Tensor weight, Optional records, Optional scale, Optional bias,
                      int64_t format, int64_t group, bool resident) {
  const bool rounded = format == int64_t(Weights::fp8_rounded);
  ProductArgs args = product_arguments("tiled_product", out, x, weight, records, scale, bias,
                                       rounded ? int64_t(Weights::fp8) : format, group, resident, -1, MAX_TILED_ROWS);
  if (rounded && args.group >= args.in_features) args.format = Weights::fp8_rounded;
  if (args.format == Weights::bf16) refuse("tiled_product: weights of bf16 are not supported");
  if (records) refuse_unaligned("tiled_product", *records, "records");
  if (args.rows == 0 || args.out_features == 0) return;
  Stream stream(out);
  const Tensor shared = torch::stable::new_empty(x, {tiled_shared(args)}, ScalarType::Byte);
  args.shared = shared.data_ptr();
  tiled_product(args, counters_of(stream).arrivals, stream);
}

void widen_op(Tensor out, Tensor weight, Optional records, Optional scale, int64_t format, int64_t group, int64_t first) {
  const Op op("widen", out);
  Argument to(op, "out", out), from(op, "weight", weight);
  to.shaped({ANY, ANY}).of(ScalarType::BFloat16).dense(), from.shaped({ANY, ANY}).of(ScalarType::Byte);
  ProductArgs args{};
  args.format = (Weights)format;
  if (args.format != Weights::int4 && args.format != Weights::fp8)
    refuse(op.name, ": format is ", format, ", 2 (int4) or 4 (fp8) expected");
  args.out = to.data();
  args.rows = to.size(0), args.in_features = to.size(1), args.out_features = from.size(0), args.group = group;
  if (args.in_features % 8) refuse(op.name, ": ", args.in_features, " inputs, a multiple of 8 expected");
  check_range(op, "the number of inputs", args.in_features, 0, INT32_MAX);
  check_range(op, "the number of outputs", args.rows, 0, args.out_features);
  if (check_range(op, "first", first, 0, args.out_features - args.rows) % 8)
    refuse(op.name, ": first is ", first, ", a multiple of 8 expected");
  set_weight(op.name, args, weight, records, scale);
  refuse_unaligned(op.name, out, "out");
  if (records) refuse_unaligned(op.name, *records, "records");
  widen(args, first, Stream(out));
}

void round_groups_op(Tensor out, Tensor x, int64_t group) {
  const Op op("round_groups", x);
  Argument from(op, "x", x), to(op, "out", out);
  from.shaped({ANY, ANY}).of(ScalarType::BFloat16).dense_rows();
  to.shaped({from.size(0), from.size(1)}).of(ScalarType::BFloat16).dense();
  refuse_unaligned(op.name, x, "x");
  refuse_unaligned(op.name, out, "out");
  RowArgs args{};
  args.out = to.data(), args.x = from.data(), args.x_stride = from.stride();
  args.rows = check_range(op, "the number of rows", from.size(0), 0, INT32_MAX);
  args.in_features = args.padded = check_range(op, "the number of inputs", from.size(1), 0, INT32_MAX);
  args.group = group;
  if (args.in_features % 8 || args.x_stride % 8) refuse(op.name, ": rows of x are not aligned to 16 bytes");
  if (group < 1 || (group < args.in_features && group % 32))
    refuse(op.name, ": groups of ", group, " inputs, a multiple of 32 expected");
  round_rows(args, Stream(out));
}

void choice_products_op(Tensor out, Tensor x, Tensor experts, Tensor weight, Optional records, Optional scale,
                        Optional bias, int64_t format, int64_t group, int64_t gate, bool early) {
  const Op op("choice_products", x);
  Argument from(op, "x", x), to(op, "out", out), chosen(op, "experts", experts), matrix(op, "weight", weight);
  from.shaped({ANY, ANY}), to.shaped({ANY, ANY}), matrix.shaped({ANY, ANY});
  chosen.shaped({to.size(0)}).of(ScalarType::Int).dense();
  const int64_t rows = from.size(0), choices = to.size(0), outputs = to.size(1) * (gate >= 0 ? 2 : 1);
  if (choices == 0) return;
  if (rows == 0 || choices % rows) refuse(op.name, ": ", choices, " choices of ", rows, " rows");
  if (outputs == 0 || outputs % 8 || matrix.size(0) % outputs)
    refuse(op.name, ": weight has ", matrix.size(0), " outputs, a multiple of ", outputs, " expected");
  const Mixture mixture{choices / rows, matrix.size(0) / outputs, Weights::mxfp4, ExpertGate::clamped_swiglu};
  ChoiceArgs args{product_arguments(op.name, out, x, weight, records, scale, bias, format, group, true, gate, MAX_CHOICES,
                                    mixture)};
  args.product.rows = 1;
  args.experts = chosen.data<int32_t>();
  args.choices = check_range(op, "the number of choices", choices, 1, MAX_CHOICES);
  args.choices_per_row = mixture.choices_per_row;
  args.early = early;
  Stream stream(out);
  if (!choice_products(args, stream)) refuse(op.name, ": this weight is not supported");
}

// The LoRA product of `inner` [shares, tokens, slices * rank] and `b` [slots, out_features, rank].
LoraTerm lora_term(const Tensor& x, const Tensor& inner, const Tensor& b, const Tensor& slots,
                   const std::vector<int64_t>& widths, int64_t out_features) {
  const Op op(OP, x);
  const int64_t slices = check_range(op, "the number of slices", widths.size(), 1, MAX_LORA_SLICES);
  LoraTerm term{};
  int64_t outputs = 0;
  for (int slice = 0; slice < MAX_LORA_SLICES; slice++) {
    if (slice < slices) outputs += check_range(op, "a width", widths[slice], 0, INT32_MAX);
    if (slice < 2) term.ends[slice] = slice + 1 < slices ? (int)outputs : INT32_MAX;
  }
  if (outputs != out_features) refuse(op.name, ": the widths add up to ", outputs, ", ", out_features, " expected");
  Argument products(op, "inner", inner), factors(op, "lora_b", b), token_slots(op, "slots", slots);
  factors.shaped({ANY, out_features, ANY}).of(ScalarType::BFloat16).dense_rows();
  products.shaped({ANY, x.size(0), slices * factors.size(2)}).of(ScalarType::Float).dense();
  token_slots.shaped({x.size(0)}).of(ScalarType::Int).dense();
  refuse_unaligned(OP, b, "lora_b");
  if (factors.size(2) % 8 || factors.stride() % 8)
    refuse(op.name, ": rank ", factors.size(2), ", a multiple of 8 expected");
  if (products.size(1) * products.size(2) > MAX_LORA_INNER)
    refuse(op.name, ": ", products.size(1) * products.size(2), " inner products, at most ", MAX_LORA_INNER,
           " expected");
  term.inner = products.data<float>();
  term.b = factors.data();
  term.slots = token_slots.data<int32_t>();
  term.shares = (int)products.size(0), term.width = (int)products.size(2), term.rank = (int)factors.size(2);
  term.tokens = (int)x.size(0), term.slot_count = (int)factors.size(0);
  term.b_stride = factors.stride();
  return term;
}

void small_batch_lora_op(Tensor out, Tensor x, Tensor weight, Optional bias, Tensor inner, Tensor b, Tensor slots,
                         std::vector<int64_t> widths) {
  ProductArgs args = product_arguments(OP, out, x, weight, {}, {}, bias, (int64_t)Weights::bf16, x.size(1), true, -1);
  args.lora = lora_term(x, inner, b, slots, widths, args.out_features);
  multiply(args, out, x);
}

// The op has no tensor arguments, so that callers need no weight on the device.
bool fits_op(int64_t device, int64_t rows, int64_t out_features, int64_t in_features, int64_t row_bytes, int64_t format,
             int64_t group, bool gated, bool normed) {
  const Op op("small_batch_fits");
  ProductArgs args{};
  args.format = (Weights)check_range(op, "format", format, 0, int64_t(Weights::fp8)),
  args.rows = check_range(op, "rows", rows, 1, MAX_ROWS);
  args.out_features = check_range(op, "out_features", out_features, 0, INT32_MAX),
  args.in_features = check_range(op, "in_features", in_features, 1, INT32_MAX);
  args.row_bytes = check_range(op, "row_bytes", row_bytes, 1, INT32_MAX),
  args.group = check_range(op, "group", group, 1, INT64_MAX);
  args.gated = gated;
  torch::stable::accelerator::DeviceGuard guard((torch::stable::accelerator::DeviceIndex)device);
  return product_fits(args, normed);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  library.def(
      "small_batch_fits(int device, int rows, int out_features, int in_features, int row_bytes, int format, int group, "
      "bool gated, "
      "bool normed) -> bool");
  library.def(
      "small_batch(Tensor(a!) out, Tensor x, Tensor weight, Tensor? records, Tensor? scale, Tensor? bias, int format, "
      "int group, bool resident, Tensor? stream, Tensor(b!)? stream_out, Tensor? norm, float eps, float offset, "
      "int gate) -> ()");
  library.def(
      "tiled_product(Tensor(a!) out, Tensor x, Tensor weight, Tensor? records, Tensor? scale, Tensor? bias, "
      "int format, int group, bool resident) -> ()");
  library.def(
      "widen(Tensor(a!) out, Tensor weight, Tensor? records, Tensor? scale, int format, int group, int first) -> ()");
  library.def("round_groups(Tensor(a!) out, Tensor x, int group) -> ()");
  library.def(
      "choice_products(Tensor(a!) out, Tensor x, Tensor experts, Tensor weight, Tensor? records, Tensor? scale, "
      "Tensor? bias, int format, int group, int gate, bool early) -> ()");
  library.def(
      "small_batch_lora(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, Tensor inner, Tensor lora_b, "
      "Tensor slots, int[] widths) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) {
  library.impl("small_batch", TORCH_BOX(&small_batch_op));
  library.impl("tiled_product", TORCH_BOX(&tiled_product_op));
  library.impl("widen", TORCH_BOX(&widen_op));
  library.impl("round_groups", TORCH_BOX(&round_groups_op));
  library.impl("choice_products", TORCH_BOX(&choice_products_op));
  library.impl("small_batch_lora", TORCH_BOX(&small_batch_lora_op));
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CompositeExplicitAutograd, library) {
  library.impl("small_batch_fits", TORCH_BOX(&fits_op));
}

}  // namespace localllm::cuda
