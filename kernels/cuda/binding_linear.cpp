// The ops small_batch and small_batch_fits: checks of their arguments. linear.h describes the arguments.
#include "../cpu/checks.h"
#include "linear.h"
#include "pages.h"
#include "queue.h"

namespace localllm::cuda {
namespace {

constexpr const char* OP = "small_batch";
constexpr int64_t MAX_ROWS = 16;

bool has_dtype(const Tensor& tensor, ScalarType type) { return tensor.scalar_type() == type; }

// Checks weight, records and scale against the format, and stores them in args.
void set_weight(ProductArgs& args, const Tensor& weight, const Optional& records, const Optional& scale) {
  Argument matrix({OP, weight}, "weight", weight);
  matrix.shaped({args.out_features, ANY}).dense();
  refuse_unaligned(OP, weight, "weight");
  args.weight = matrix.data();
  args.row_bytes = matrix.size(1) * matrix.bytes();
  int64_t min_bytes = args.format == Weights::bf16 ? args.in_features * 2
                      : args.format == Weights::int8 || args.format == Weights::fp8
                          ? args.in_features
                          : round_up(args.in_features, 128) / 2;
  if (args.row_bytes < min_bytes || args.row_bytes % 16 || args.row_bytes > 2 * min_bytes + 64)
    refuse(OP, ": a row of weight has ", args.row_bytes, " bytes, at least ", min_bytes,
           " in multiples of 16 expected");
  if (scale)
    args.scale =
        Argument({OP, weight}, "scale", *scale).shaped({args.out_features}).of(ScalarType::Float).dense().data<float>();
  bool fp8 = args.format == Weights::fp8, grouped = fp8 ? args.group < args.in_features : args.format >= Weights::int4;
  bool scaled = args.format == Weights::int8 || (fp8 && !grouped);
  if (grouped != records.has_value() || scaled != scale.has_value())
    refuse(OP, ": records or scale do not fit this format");
  if (!grouped) return;
  if (args.group < 1 || (args.group < args.in_features && args.group % (fp8 ? 64 : 32)))
    refuse(OP, ": groups of ", args.group, " inputs, a multiple of ", fp8 ? 64 : 32, " expected");
  int64_t subgroup = fp8                                                       ? args.group
                     : args.group % 128 == 0 || args.group >= args.in_features ? 128
                     : args.group % 64 == 0                                    ? 64
                                                                               : 32;
  Argument record_table({OP, weight}, "records", *records);
  record_table.shaped({(args.out_features + 7) / 8, (args.in_features + subgroup - 1) / subgroup, 8})
      .of(ScalarType::Int)
      .dense();
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

void small_batch_op(Tensor out, Tensor x, Tensor weight, Optional records, Optional scale, Optional bias,
                    int64_t format, int64_t group, bool resident, Optional stream, Optional stream_out, Optional norm,
                    double eps, double offset, int64_t gate) {
  Argument to({OP, x}, "out", out), from({OP, x}, "x", x);
  from.shaped({ANY, ANY}).of(ScalarType::BFloat16).dense_rows();
  to.shaped({from.size(0), ANY}).written_rows();
  if (format < 0 || format > 4) refuse(OP, ": format is ", format, ", 0 to 4 expected");
  if (gate < -1 || gate > 2) refuse(OP, ": gate is ", gate, ", -1 to 2 expected");
  ProductArgs args{};
  args.format = (Weights)format;
  args.gated = gate >= 0;
  args.gate = args.gated ? (Activation)gate : Activation::silu;
  args.rows = from.size(0), args.in_features = from.size(1), args.out_features = to.size(1) * (args.gated ? 2 : 1),
  args.group = group;
  args.out = to.data();
  args.x = from.data();
  args.out_type = to.number();
  args.x_stride = from.stride();
  args.out_stride = to.stride();
  args.resident = resident;
  if (args.rows > MAX_ROWS) refuse(OP, ": ", args.rows, " rows, no more than ", MAX_ROWS, " expected");
  if (args.in_features % 8 || args.x_stride % 8 || (uintptr_t)args.x % 16) refuse(OP, ": x is not aligned to 16 bytes");
  if (args.gated && to.size(1) % 8) refuse(OP, ": ", to.size(1), " gated outputs, a multiple of 8 expected");
  if (has_dtype(weight, ScalarType::BFloat16) != (args.format == Weights::bf16))
    refuse(OP, ": weight has the wrong dtype");
  set_weight(args, weight, records, scale);
  set_norm(args, x, stream, stream_out, norm, eps, offset);
  if (bias) {
    Argument shift({OP, x}, "bias", *bias);
    shift.shaped({args.out_features}).dense();
    args.bias = shift.data();
    args.bias_type = shift.number();
  }
  Queue queue(out);
  Tensor shared = x;
  if (int64_t bytes = product_shared(args)) {
    shared = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
    args.shared = shared.data_ptr();
  }
  product(args, queue);
}

// The op has no tensor arguments, so that callers need no weight on the device.
bool fits_op(int64_t device, int64_t rows, int64_t out_features, int64_t in_features, int64_t row_bytes, int64_t format,
             int64_t group, bool gated, bool normed) {
  const Op op("small_batch_fits");
  ProductArgs args{};
  args.format = (Weights)check_range(op, "format", format, 0, 4),
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
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) { library.impl("small_batch", TORCH_BOX(&small_batch_op)); }

STABLE_TORCH_LIBRARY_IMPL(localllm, CompositeExplicitAutograd, library) {
  library.impl("small_batch_fits", TORCH_BOX(&fits_op));
}

}  // namespace localllm::cuda
