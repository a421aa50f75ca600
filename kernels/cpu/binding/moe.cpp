// The ops of a mixture of experts: they check their arguments and place the experts' intermediate results in shared
// memory.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "checks.h"
#include "../isa/dispatch.h"
#include "../team/memory.h"
#include "../moe/plan.h"
#include "routed_experts.h"
#include "../team/team.h"

namespace localllm {
namespace {

constexpr int64_t MAX_RESULT_BYTES = 64 << 20;  // more tokens are computed in chunks

// How the router of a mixture of experts chooses.
struct Routing {
  int64_t score;
  bool renormalise;
  double scale;
  int64_t groups, top_groups;
  bool top2;
};

// The arguments of the router except its logits and its results. `correction`: [count] float32.
RouteArgs route_arguments(const char* op, int64_t tokens, int64_t count, int64_t top_k, const Routing& routing,
                          const std::optional<Tensor>& correction) {
  RouteArgs args{};
  args.tokens = tokens;
  args.count = args.stride = count;
  args.groups = check_range(op, "groups", routing.groups, 1, std::max<int64_t>(count, 1));
  if (count % args.groups) refuse(op, ": ", count, " experts are not divisible into ", args.groups, " groups");
  args.top_groups = check_range(op, "top_groups", routing.top_groups, 1, args.groups);
  args.top_k = check_range(op, "the number of chosen experts", top_k, 1, count / args.groups * args.top_groups);
  args.score = (RouterScore)check_range(op, "score", routing.score, 0, 1);
  args.renormalise = routing.renormalise;
  args.top2 = routing.top2;
  args.scale = (float)routing.scale;
  if (correction) {
    Argument shift(op, "correction", *correction);
    args.correction = shift.shaped({count}).of(ScalarType::Float).dense().data<float>();
  }
  return args;
}

void route(Tensor experts, Tensor weights, Tensor logits, std::optional<Tensor> correction, int64_t score,
           bool renormalise, double scale, int64_t groups, int64_t top_groups, bool top2) {
  const char* op = "route";
  Argument from(op, "logits", logits), ids(op, "experts", experts), to(op, "weights", weights);
  from.shaped({ANY, ANY}).of(ScalarType::Float).dense_rows();
  ids.shaped({from.size(0), ANY}).of(ScalarType::Int).dense();
  to.shaped({from.size(0), ids.size(1)}).of(ScalarType::Float).dense();
  const Routing routing{score, renormalise, scale, groups, top_groups, top2};
  RouteArgs args = route_arguments(op, from.size(0), from.size(1), ids.size(1), routing, correction);
  args.experts = ids.data<int32_t>();
  args.weights = to.data<float>();
  args.logits = from.data<float>();
  args.stride = from.stride();
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

// The weights of the experts, as moe/experts.py passes them.
struct Stacked {
  const Tensor &gate_up, &down;
  const std::optional<Tensor>&gate_up_bias, &down_bias;
  int64_t format, gate_up_group, down_group;
  bool wide;
  int64_t experts, inner, gate;
};

// The arguments of the experts except the choices of the tokens.
ExpertsArgs experts_arguments(const char* op, const Tensor& out, const Tensor& x, const Stacked& stacks) {
  Argument to(op, "out", out), from(op, "x", x), gate_up(op, "gate_up", stacks.gate_up), down(op, "down", stacks.down);
  from.shaped({ANY, ANY}).dense_rows();
  ExpertsArgs args{};
  args.tokens = from.size(0);
  args.hidden = from.size(1);
  args.type = from.number();
  if (to.shaped({args.tokens, args.hidden}).dense().number() != args.type)
    refuse(op, ": out and x are of different types");
  check_range(op, "experts", stacks.experts, 1, INT32_MAX);
  args.inner = check_range(op, "inner", stacks.inner, 1, INT32_MAX / 2);
  if (args.inner % PANEL || args.hidden % PANEL)
    refuse(op, ": hidden ", args.hidden, " and inner ", args.inner, ", multiples of ", PANEL, " expected");
  args.format = (Format)check_range(op, "format", stacks.format, 0, FORMATS - 1);
  args.wide = stacks.wide;
  if (args.wide && args.format != Format::int4) refuse(op, ": wide is for int4 only");
  args.gate = (ExpertGate)check_range(op, "gate", stacks.gate, 0, 3);
  args.gate_up_group = check_stack(op, gate_up, stacks.gate_up_bias, &args.gate_up_bias, args.format, stacks.experts,
                                   2 * args.inner, args.hidden, stacks.gate_up_group);
  args.down_group = check_stack(op, down, stacks.down_bias, &args.down_bias, args.format, stacks.experts, args.hidden,
                                args.inner, stacks.down_group);
  args.gate_up = gate_up.data();
  args.down = down.data();
  args.x = from.data();
  args.out = to.data();
  args.x_stride = from.stride();
  return args;
}

// Runs the experts for all tokens of `args`, some of them at a time.
void run_chunks(Run& run, const ExpertsArgs& args, const int32_t* chosen, int64_t experts) {
  int64_t token_bytes = args.top_k * args.hidden * sizeof(float), element_bytes = args.type == Type::f32 ? 4 : 2;
  int64_t chunks = (args.tokens * token_bytes + MAX_RESULT_BYTES - 1) / MAX_RESULT_BYTES;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    int64_t first = args.tokens * chunk / chunks, end = args.tokens * (chunk + 1) / chunks;
    ExpertsArgs part = args;
    part.tokens = end - first;
    part.x = (const char*)args.x + first * args.x_stride * element_bytes;
    part.out = (char*)args.out + first * args.hidden * element_bytes;
    part.weights = args.weights + first * args.top_k;
    run_experts(run, part, chosen + first * args.top_k, experts);
  }
}

void experts(Tensor out, Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down,
             std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias, int64_t format, int64_t gate_up_group,
             int64_t down_group, bool wide, int64_t experts, int64_t inner, int64_t gate) {
  const char* op = "experts";
  ExpertsArgs args = experts_arguments(op, out, x, {gate_up, down, gate_up_bias, down_bias, format, gate_up_group,
                                                    down_group, wide, experts, inner, gate});
  Argument ids(op, "chosen", chosen), factors(op, "weights", weights);
  ids.shaped({args.tokens, ANY}).of(ScalarType::Int).below(experts);
  args.top_k = check_range(op, "the number of choices", ids.size(1), 1, experts);
  args.weights = factors.shaped({args.tokens, args.top_k}).of(ScalarType::Float).dense().data<float>();
  if (args.tokens == 0) return;
  Run run(touched_bytes(args, experts));
  run_chunks(run, args, ids.data<int32_t>(), experts);
}

struct RouterCall {
  const Variant* variant;
  LinearArgs logits;
  RouteArgs route;
};

void run_router(const RouterCall& call, const Worker& worker) {
  call.variant->linear(call.logits, worker);
  worker.barrier();
  call.variant->route(call.route, worker);
}

}  // namespace

void routed_experts(Tensor out, Tensor x, Tensor router, std::optional<Tensor> router_bias, int64_t router_format,
                    int64_t router_group, std::optional<Tensor> correction, int64_t score, bool renormalise,
                    double scale, int64_t groups, int64_t top_groups, bool top2, int64_t top_k, Tensor gate_up,
                    Tensor down, std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias, int64_t format,
                    int64_t gate_up_group, int64_t down_group, bool wide, int64_t experts, int64_t inner,
                    int64_t gate) {
  const char* op = "routed_experts";
  ExpertsArgs args = experts_arguments(op, out, x, {gate_up, down, gate_up_bias, down_bias, format, gate_up_group,
                                                    down_group, wide, experts, inner, gate});
  RouterCall call{&variant(), {}, {}};
  call.route = route_arguments(op, args.tokens, experts, top_k, {score, renormalise, scale, groups, top_groups, top2},
                               correction);
  args.top_k = call.route.top_k;
  LinearArgs& logits = call.logits;
  logits.format = (Format)check_range(op, "router_format", router_format, 0, FORMATS - 1);
  logits.group = check_group(op, logits.format, args.hidden, router_group);
  Argument weight(op, "router", router);
  check_packed(op, weight, logits.format, experts, args.hidden, logits.group);
  logits.weight = weight.data();
  if (router_bias) {
    Argument shift(op, "router_bias", *router_bias);
    logits.bias = shift.shaped({experts}).of(ScalarType::Float).dense().data<float>();
  }
  if (args.tokens == 0) return;
  static thread_local Buffer results;  // logits, weights and numbers of the chosen experts
  int64_t logit_count = args.tokens * experts, choices = args.tokens * args.top_k;
  float* memory = (float*)results.reserve((logit_count + 2 * choices) * sizeof(float));
  logits.x = args.x;
  logits.x_type = args.type;
  logits.x_stride = args.x_stride;
  logits.out = memory;
  logits.out_type = Type::f32;
  logits.out_stride = logits.out_features = experts;
  logits.rows = args.tokens;
  logits.in_features = args.hidden;
  call.route.logits = memory;
  call.route.weights = memory + logit_count;
  call.route.experts = (int32_t*)(memory + logit_count + choices);
  args.weights = call.route.weights;
  Run run(touched_bytes(args, experts) + weight.count());
  logits.shared = run.shared(call.variant->linear_shared(logits, run.workers()));
  run.all(run_router, call);
  run_chunks(run, args, call.route.experts, experts);
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CPU, library) {
  library.impl("route", TORCH_BOX(&route));
  library.impl("experts", TORCH_BOX(&experts));
  library.impl("routed_experts", TORCH_BOX(&routed_experts));
}

}  // namespace localllm
