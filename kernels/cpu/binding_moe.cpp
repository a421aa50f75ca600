// The ops of a mixture of experts: they check their arguments and place the experts' intermediate results in shared
// memory.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "checks.h"
#include "dispatch.h"
#include "memory.h"
#include "moe_plan.h"
#include "team.h"

namespace localllm {
namespace {

constexpr int64_t MAX_RESULT_BYTES = 64 << 20;  // more tokens are computed in chunks

void route(Tensor experts, Tensor weights, Tensor logits, std::optional<Tensor> correction, int64_t score,
           bool renormalise, double scale, int64_t groups, int64_t top_groups, bool top2) {
  const char* op = "route";
  Argument from(op, "logits", logits), ids(op, "experts", experts), to(op, "weights", weights);
  from.shaped({ANY, ANY}).of(ScalarType::Float).dense_rows();
  ids.shaped({from.size(0), ANY}).of(ScalarType::Int).dense();
  to.shaped({from.size(0), ids.size(1)}).of(ScalarType::Float).dense();
  RouteArgs args{};
  args.experts = ids.data<int32_t>();
  args.weights = to.data<float>();
  args.logits = from.data<float>();
  args.tokens = from.size(0);
  args.count = from.size(1);
  args.stride = from.stride();
  args.groups = check_range(op, "groups", groups, 1, std::max<int64_t>(args.count, 1));
  if (args.count % args.groups) refuse(op, ": ", args.count, " experts are not divisible into ", groups, " groups");
  args.top_groups = check_range(op, "top_groups", top_groups, 1, args.groups);
  int64_t candidates = args.count / args.groups * args.top_groups;
  args.top_k = check_range(op, "the number of chosen experts", ids.size(1), 1, candidates);
  args.score = (RouterScore)check_range(op, "score", score, 0, 1);
  args.renormalise = renormalise;
  args.top2 = top2;
  args.scale = (float)scale;
  if (correction) {
    Argument shift(op, "correction", *correction);
    args.correction = shift.shaped({args.count}).of(ScalarType::Float).dense().data<float>();
  }
  if (args.tokens) Run(args.tokens * args.count * 16).all(variant().route, args);
}

// Checks one of the stacked weights; returns its group. `bias`: [experts, outputs] float32.
int64_t check_stack(const char* op, Argument& packed, const std::optional<Tensor>& bias, const float** biases,
                    Format format, int64_t experts, int64_t out_features, int64_t in_features, int64_t group) {
  group = check_group(op, format, in_features, group);
  check_packed(op, packed, format, experts * out_features, in_features, group);
  if (bias) {
    Argument shift(op, "a bias", *bias);
    *biases = shift.shaped({experts, out_features}).of(ScalarType::Float).dense().data<float>();
  }
  return group;
}

// Approximate number of bytes of the weights that the products read.
int64_t touched_bytes(const ExpertsArgs& args, int64_t experts) {
  int64_t weight = panel_bytes(args.format, args.hidden, args.gate_up_group) * (2 * args.inner / PANEL) +
                   panel_bytes(args.format, args.inner, args.down_group) * (args.hidden / PANEL);
  return std::min(args.tokens * args.top_k, experts) * weight;
}

// Runs the experts for the tokens of `args`; chosen: [tokens, top_k].
void run_experts(Run& run, ExpertsArgs args, const int32_t* chosen, int64_t experts) {
  static thread_local Buffer plan_memory;
  int64_t rows = args.tokens * args.top_k;
  args.plan = plan_experts(chosen, args.tokens, args.top_k, experts, plan_memory.reserve(plan_bytes(rows, experts)));
  int64_t gated_bytes = round_up(rows * args.inner * (args.type == Type::f32 ? 4 : 2), 64);
  int64_t result_bytes = rows * args.hidden * sizeof(float);
  char* memory = (char*)run.shared(gated_bytes + result_bytes + variant().experts_shared(args));
  args.gated = memory;
  args.results = (float*)(memory + gated_bytes);
  args.shared = memory + gated_bytes + result_bytes;
  run.all(variant().experts, args);
}

void experts(Tensor out, Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down,
             std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias, int64_t format, int64_t gate_up_group,
             int64_t down_group, bool wide, int64_t experts, int64_t inner, int64_t gate) {
  const char* op = "experts";
  Argument to(op, "out", out), from(op, "x", x), ids(op, "chosen", chosen), factors(op, "weights", weights);
  Argument gate_up_weight(op, "gate_up", gate_up), down_weight(op, "down", down);
  from.shaped({ANY, ANY}).dense_rows();
  ExpertsArgs args{};
  args.tokens = from.size(0);
  args.hidden = from.size(1);
  args.type = from.number();
  if (to.shaped({args.tokens, args.hidden}).dense().number() != args.type)
    refuse(op, ": out and x are of different types");
  check_range(op, "experts", experts, 1, INT32_MAX);
  ids.shaped({args.tokens, ANY}).of(ScalarType::Int).below(experts);
  args.top_k = check_range(op, "the number of choices", ids.size(1), 1, experts);
  factors.shaped({args.tokens, args.top_k}).of(ScalarType::Float).dense();
  args.inner = check_range(op, "inner", inner, 1, INT32_MAX / 2);
  if (args.inner % PANEL || args.hidden % PANEL)
    refuse(op, ": hidden ", args.hidden, " and inner ", inner, ", multiples of ", PANEL, " expected");
  args.format = (Format)check_range(op, "format", format, 0, FORMATS - 1);
  args.wide = wide;
  if (wide && args.format != Format::int4) refuse(op, ": wide is for int4 only");
  args.gate = (ExpertGate)check_range(op, "gate", gate, 0, 3);
  args.gate_up_group = check_stack(op, gate_up_weight, gate_up_bias, &args.gate_up_bias, args.format, experts,
                                   2 * args.inner, args.hidden, gate_up_group);
  args.down_group = check_stack(op, down_weight, down_bias, &args.down_bias, args.format, experts, args.hidden,
                                args.inner, down_group);
  args.gate_up = gate_up_weight.data();
  args.down = down_weight.data();
  args.x_stride = from.stride();
  if (args.tokens == 0) return;
  Run run(touched_bytes(args, experts));
  int64_t token_bytes = args.top_k * args.hidden * sizeof(float);
  int64_t chunks = (args.tokens * token_bytes + MAX_RESULT_BYTES - 1) / MAX_RESULT_BYTES;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    int64_t first = args.tokens * chunk / chunks, end = args.tokens * (chunk + 1) / chunks;
    ExpertsArgs part = args;
    part.tokens = end - first;
    part.x = from.data<char>() + first * args.x_stride * from.bytes();
    part.out = to.data<char>() + first * args.hidden * to.bytes();
    part.weights = factors.data<float>() + first * args.top_k;
    run_experts(run, part, ids.data<int32_t>() + first * args.top_k, experts);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(localllm, CPU, library) {
  library.impl("route", TORCH_BOX(&route));
  library.impl("experts", TORCH_BOX(&experts));
}

}  // namespace localllm
