// The CPU ops of recurrent layers: their checks, and the arguments of their kernels.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "../team/team.h"
#include "checks.h"

namespace localllm {
namespace {

// The rows of `tokens` tokens, whose slots are below `slots`. Two rows of one slot would overwrite each other's state.
StateRows state_rows(const char* op, const Tensor& row_starts, const Tensor& context_lens, const Tensor& slots,
                     int64_t tokens, int64_t limit) {
  Argument starts(op, "row_starts", row_starts), lens(op, "context_lens", context_lens), ids(op, "slots", slots);
  lens.shaped({ANY}).of(ScalarType::Int).dense();
  starts.shaped({lens.size(0) + 1}).of(ScalarType::Int).dense();
  ids.shaped({lens.size(0)}).of(ScalarType::Int).dense();
  StateRows rows{starts.data<int32_t>(), lens.data<int32_t>(), ids.data<int32_t>(), lens.size(0)};
  if (rows.row_starts[0] != 0 || rows.row_starts[rows.rows] != tokens)
    refuse(op, ": row_starts goes from ", rows.row_starts[0], " to ", rows.row_starts[rows.rows], ", 0 to ", tokens,
           " (the tokens of x) expected");
  for (int64_t row = 0; row < rows.rows; row++) {
    if (rows.row_starts[row + 1] < rows.row_starts[row]) refuse(op, ": row_starts goes down after row ", row);
    if (rows.slots[row] < -1 || rows.slots[row] >= limit)
      refuse(op, ": slots[", row, "] is ", rows.slots[row], ", -1 (none) to ", limit - 1, " expected");
  }
  return rows;
}

const float* per_head(const char* op, const char* name, const Tensor& tensor, int64_t heads) {
  Argument argument(op, name, tensor);
  return argument.shaped({heads}).of(ScalarType::Float).dense().data<float>();
}

void causal_conv(Tensor out, Tensor x, Tensor row_starts, Tensor context_lens, Tensor slots, Tensor weight,
                 std::optional<Tensor> bias, Tensor states, bool gated) {
  const char* op = "causal_conv";
  Argument to(op, "out", out), from(op, "x", x), taps(op, "weight", weight), state(op, "states", states);
  taps.shaped({ANY, ANY}).dense();
  int64_t width = taps.size(0), channels = taps.size(1);
  if (width < 2 || width > MAX_CONV_WIDTH)
    refuse(op, ": weight has ", width, " rows, 2 to ", MAX_CONV_WIDTH, " expected");
  from.shaped({ANY, gated ? 3 * channels : channels}).dense_rows();
  to.shaped({from.size(0), channels}).dense();
  state.shaped({ANY, width - 1, channels}).of(ScalarType::Float).dense();
  if (to.number() != from.number()) refuse(op, ": out and x are of different types");
  ConvArgs args{};
  args.rows = state_rows(op, row_starts, context_lens, slots, from.size(0), state.size(0));
  args.out = to.data();
  args.x = from.data();
  args.weight = taps.data();
  args.type = from.number();
  args.weight_type = taps.number();
  args.states = state.data<float>();
  args.channels = channels;
  args.width = width;
  args.x_stride = from.stride();
  args.gated = gated;
  if (bias) {
    Argument shift(op, "bias", *bias);
    if (shift.shaped({channels}).dense().number() != args.weight_type)
      refuse(op, ": bias and weight are of different types");
    args.bias = shift.data();
  }
  if (to.count() == 0) return;
  Run(to.count() * 2 * to.bytes() + args.rows.rows * (width - 1) * channels * 8).all(variant().causal_conv, args);
}

// Stores the tensors of both scans. The queries, keys and values of a token of x may be in any order.
void scan(const char* op, ScanArgs& args, const Tensor& out, Argument& x, const Tensor& rates, const Tensor& dt_bias,
          Argument& states) {
  x.shaped({ANY, ANY}).dense_rows();
  states.shaped({ANY, ANY, ANY, ANY}).of(ScalarType::Float).dense();
  args.heads = states.size(1);
  args.key_dim = states.size(2);
  args.value_dim = states.size(3);
  int64_t keys = x.size(1) - args.heads * args.value_dim, step = 2 * args.key_dim;
  args.key_heads = step > 0 && keys > 0 ? keys / step : 0;
  if (args.key_heads == 0 || args.key_heads * step != keys || args.heads % args.key_heads != 0)
    refuse(op, ": x has ", x.size(1), " columns, which are no queries, keys and values for the ", args.heads,
           " heads of [", args.key_dim, ", ", args.value_dim, "] in states");
  Argument to(op, "out", out);
  to.shaped({x.size(0), args.heads, args.value_dim}).dense();
  if (to.number() != x.number()) refuse(op, ": out and x are of different types");
  args.out = to.data();
  args.x = x.data();
  args.type = x.number();
  args.stride = x.stride();
  args.rates = per_head(op, "rates", rates, args.heads);
  args.dt_bias = per_head(op, "dt_bias", dt_bias, args.heads);
  args.states = states.data<float>();
}

// A factor of each token and head, of the type of x.
const void* per_token(const char* op, const char* name, const Tensor& tensor, const ScanArgs& args, int64_t tokens,
                      int64_t* stride) {
  Argument argument(op, name, tensor);
  if (argument.shaped({tokens, args.heads}).dense_rows().number() != args.type)
    refuse(op, ": ", name, " and x are of different types");
  *stride = argument.stride();
  return argument.data();
}

void run(const ScanArgs& args, int64_t tokens) {
  if (tokens == 0 || args.heads == 0 || args.value_dim == 0) return;
  int64_t size = args.heads * args.value_dim;
  Run((args.rows.rows * args.key_dim * 8 + tokens * 16) * size).all(variant().scan, args);
}

void gated_delta(Tensor out, Tensor qkv, Tensor a, Tensor b, Tensor row_starts, Tensor context_lens, Tensor slots,
                 Tensor rates, Tensor dt_bias, Tensor states) {
  const char* op = "gated_delta";
  Argument x(op, "qkv", qkv), state(op, "states", states);
  ScanArgs args{};
  scan(op, args, out, x, rates, dt_bias, state);
  args.key = args.key_heads * args.key_dim;
  args.value = 2 * args.key;
  args.step = per_token(op, "a", a, args, x.size(0), &args.step_stride);
  args.beta = per_token(op, "b", b, args, x.size(0), &args.beta_stride);
  args.dt_max = INFINITY;
  args.rows = state_rows(op, row_starts, context_lens, slots, x.size(0), state.size(0));
  run(args, x.size(0));
}

void ssd(Tensor out, Tensor tokens, Tensor dt, Tensor row_starts, Tensor context_lens, Tensor slots, Tensor rates,
         Tensor dt_bias, Tensor skip, double dt_min, double dt_max, Tensor states) {
  const char* op = "ssd";
  Argument x(op, "x", tokens), state(op, "states", states);
  ScanArgs args{};
  scan(op, args, out, x, rates, dt_bias, state);
  args.key = args.heads * args.value_dim;  // the values are first
  args.query = args.key + args.key_heads * args.key_dim;
  args.step = per_token(op, "dt", dt, args, x.size(0), &args.step_stride);
  args.skip = per_head(op, "skip", skip, args.heads);
  args.dt_min = (float)dt_min;
  args.dt_max = (float)dt_max;
  args.rows = state_rows(op, row_starts, context_lens, slots, x.size(0), state.size(0));
  run(args, x.size(0));
}

void gated_norm(Tensor out, Tensor x, Tensor gate, Tensor weight, double eps, int64_t order) {
  const char* op = "gated_norm";
  Argument to(op, "out", out), from(op, "x", x), factor(op, "gate", gate), scale(op, "weight", weight);
  from.shaped({ANY, ANY, ANY}).dense_rows();
  factor.shaped({from.size(0), from.size(1), from.size(2)}).dense_rows();
  to.shaped({from.size(0), from.size(1), from.size(2)}).dense();
  if (to.number() != from.number() || factor.number() != from.number())
    refuse(op, ": out, x and gate are of different types");
  GatedNormArgs args{};
  args.shared_weight = scale.dims() == 1;
  if (args.shared_weight) scale.shaped({from.size(2)});
  else scale.shaped({from.size(1), from.size(2)});
  args.weight = scale.dense().data();
  args.weight_type = scale.number();
  args.out = to.data();
  args.x = from.data();
  args.gate = factor.data();
  args.type = from.number();
  args.tokens = from.size(0);
  args.groups = from.size(1);
  args.dim = from.size(2);
  args.x_stride = from.stride();
  args.gate_stride = factor.stride();
  args.eps = (float)eps;
  args.order = (GateOrder)check_range(op, "order", order, 0, 1);
  if (to.count() == 0) return;
  Run(3 * to.count() * to.bytes()).all(variant().gated_norm, args);
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CPU, library) {
  library.impl("causal_conv", TORCH_BOX(&causal_conv));
  library.impl("gated_delta", TORCH_BOX(&gated_delta));
  library.impl("ssd", TORCH_BOX(&ssd));
  library.impl("gated_norm", TORCH_BOX(&gated_norm));
}

}  // namespace
}  // namespace localllm
