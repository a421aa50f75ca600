// The ops few_rows and few_rows_fits: checks of their arguments. linear.h describes the arguments.
#include "../cpu/checks.h"
#include "linear.h"
#include "pages.h"
#include "queue.h"

namespace localllm::cuda {
namespace {

constexpr const char* OP = "few_rows";
constexpr int64_t MAX_ROWS = 16;

bool holds(const Tensor& tensor, ScalarType type) { return tensor.scalar_type() == type; }

// Checks weight, records and scale against the format, and stores them in args.
void take_weight(ProductArgs& args, const Tensor& weight, const Optional& records, const Optional& scale) {
  Argument held({OP, weight}, "weight", weight);
  held.shaped({args.outs, ANY}).dense();
  refuse_unaligned(OP, weight, "weight");
  args.weight = held.data(), args.row_bytes = held.size(1) * held.bytes();
  int64_t least = args.format == Weights::bf16 ? args.ins * 2
                  : args.format == Weights::int8 || args.format == Weights::fp8 ? args.ins
                                                                                : round_up(args.ins, 128) / 2;
  if (args.row_bytes < least || args.row_bytes % 16 || args.row_bytes > 2 * least + 64)
    refuse(OP, ": a row of weight has ", args.row_bytes, " bytes, at least ", least, " in multiples of 16 expected");
  if (scale) args.scale = Argument({OP, weight}, "scale", *scale).shaped({args.outs}).of(ScalarType::Float).dense().data<float>();
  bool fp8 = args.format == Weights::fp8, grouped = fp8 ? args.group < args.ins : args.format >= Weights::int4;
  bool scaled = args.format == Weights::int8 || (fp8 && !grouped);
  if (grouped != records.has_value() || scaled != scale.has_value())
    refuse(OP, ": records or scale do not fit this format");
  if (!grouped) return;
  if (args.group < 1 || (args.group < args.ins && args.group % (fp8 ? 64 : 32)))
    refuse(OP, ": groups of ", args.group, " inputs, a multiple of ", fp8 ? 64 : 32, " expected");
  int64_t sub = fp8 ? args.group : args.group % 128 == 0 || args.group >= args.ins ? 128 : args.group % 64 == 0 ? 64 : 32;
  Argument of_groups({OP, weight}, "records", *records);
  of_groups.shaped({(args.outs + 7) / 8, (args.ins + sub - 1) / sub, 8}).of(ScalarType::Int).dense();
  args.records = of_groups.data();
}

void take_norm(ProductArgs& args, const Tensor& x, const Optional& stream, const Optional& stream_out,
               const Optional& norm, double eps, double offset) {
  if (!norm) {
    if (stream || stream_out) refuse(OP, ": stream and stream_out need a norm");
    return;
  }
  Argument weight({OP, x}, "norm", *norm);
  weight.shaped({args.ins}).dense();
  args.norm = weight.data(), args.norm_type = weight.number(), args.eps = (float)eps, args.offset = (float)offset;
  if (stream.has_value() != stream_out.has_value()) refuse(OP, ": stream and stream_out must be given together");
  if (!stream) return;
  Argument before({OP, x}, "stream", *stream), after({OP, x}, "stream_out", *stream_out);
  before.shaped({args.rows, args.ins}).of(ScalarType::BFloat16).dense();
  after.shaped({args.rows, args.ins}).of(ScalarType::BFloat16).dense();
  refuse_unaligned(OP, *stream, "stream"), refuse_unaligned(OP, *stream_out, "stream_out");
  args.stream = before.data(), args.stream_out = after.data();
  if (args.stream == args.stream_out) refuse(OP, ": stream_out must not be the memory of stream");
}

void few_rows_op(Tensor out, Tensor x, Tensor weight, Optional records, Optional scale, Optional bias, int64_t format,
                 int64_t group, bool resident, Optional stream, Optional stream_out, Optional norm, double eps,
                 double offset, int64_t gate) {
  Argument to({OP, x}, "out", out), from({OP, x}, "x", x);
  from.shaped({ANY, ANY}).of(ScalarType::BFloat16).dense_rows();
  to.shaped({from.size(0), ANY}).written_rows();
  if (format < 0 || format > 4) refuse(OP, ": format is ", format, ", 0 to 4 expected");
  if (gate < -1 || gate > 2) refuse(OP, ": gate is ", gate, ", -1 to 2 expected");
  ProductArgs args{};
  args.format = (Weights)format, args.gated = gate >= 0, args.gate = args.gated ? (Activation)gate : Activation::silu;
  args.rows = from.size(0), args.ins = from.size(1), args.outs = to.size(1) * (args.gated ? 2 : 1), args.group = group;
  args.out = to.data(), args.x = from.data(), args.out_type = to.number();
  args.x_stride = from.stride(), args.out_stride = to.stride(), args.resident = resident;
  if (args.rows > MAX_ROWS) refuse(OP, ": ", args.rows, " rows, no more than ", MAX_ROWS, " expected");
  if (args.ins % 8 || args.x_stride % 8 || (uintptr_t)args.x % 16) refuse(OP, ": x is not aligned to 16 bytes");
  if (args.gated && to.size(1) % 8) refuse(OP, ": ", to.size(1), " gated outputs, a multiple of 8 expected");
  if (holds(weight, ScalarType::BFloat16) != (args.format == Weights::bf16)) refuse(OP, ": weight has the wrong dtype");
  take_weight(args, weight, records, scale);
  take_norm(args, x, stream, stream_out, norm, eps, offset);
  if (bias) {
    Argument shift({OP, x}, "bias", *bias);
    shift.shaped({args.outs}).dense();
    args.bias = shift.data(), args.bias_type = shift.number();
  }
  Queue queue(out);
  Tensor shared = x;
  if (int64_t bytes = product_shared(args)) {
    shared = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
    args.shared = shared.data_ptr();
  }
  product(args, queue);
}

// Has no tensor arguments, so that it needs no weight on the device.
bool fits_op(int64_t device, int64_t rows, int64_t outs, int64_t ins, int64_t row_bytes, int64_t format, int64_t group,
             bool gated, bool normed) {
  const Op op("few_rows_fits");
  ProductArgs args{};
  args.format = (Weights)check_range(op, "format", format, 0, 4),
  args.rows = check_range(op, "rows", rows, 1, MAX_ROWS);
  args.outs = check_range(op, "outs", outs, 0, INT32_MAX), args.ins = check_range(op, "ins", ins, 1, INT32_MAX);
  args.row_bytes = check_range(op, "row_bytes", row_bytes, 1, INT32_MAX),
  args.group = check_range(op, "group", group, 1, INT64_MAX);
  args.gated = gated;
  torch::stable::accelerator::DeviceGuard guard((torch::stable::accelerator::DeviceIndex)device);
  return product_fits(args, normed);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  library.def(
      "few_rows_fits(int device, int rows, int outs, int ins, int row_bytes, int format, int group, bool gated, "
      "bool normed) -> bool");
  library.def(
      "few_rows(Tensor(a!) out, Tensor x, Tensor weight, Tensor? records, Tensor? scale, Tensor? bias, int format, "
      "int group, bool resident, Tensor? stream, Tensor(b!)? stream_out, Tensor? norm, float eps, float offset, "
      "int gate) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) { library.impl("few_rows", TORCH_BOX(&few_rows_op)); }

STABLE_TORCH_LIBRARY_IMPL(localllm, CompositeExplicitAutograd, library) {
  library.impl("few_rows_fits", TORCH_BOX(&fits_op));
}

}  // namespace localllm::cuda
