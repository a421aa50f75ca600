// The router of a mixture of experts, and the choice of the experts' products by weight format.

#include "formats.h"

#include "../vectors/row.h"

namespace localllm::VARIANT {

void experts(const ExpertsArgs& args, const Worker& worker) {
  switch (args.format) {
    case Format::f32:
    case Format::bf16:
    case Format::f16: return experts_dense(args, worker);
    case Format::int8: return experts_int8(args, worker);
    case Format::int4: return experts_int4(args, worker);
    case Format::fp8: return experts_fp8(args, worker);
    case Format::mxfp4: return experts_mxfp4(args, worker);
  }
}

size_t experts_shared(const ExpertsArgs& args) {
  switch (args.format) {
    case Format::f32:
    case Format::bf16:
    case Format::f16: return experts_dense_shared(args);
    case Format::int8: return experts_int8_shared(args);
    case Format::int4: return experts_int4_shared(args);
    case Format::fp8: return experts_fp8_shared(args);
    case Format::mxfp4: return experts_mxfp4_shared(args);
  }
  return 0;
}

namespace {

// scores [count] = the softmax or the sigmoids of the logits.
void score_experts(const RouteArgs& args, const float* logits, float* scores) {
  if (args.score == RouterScore::sigmoid) {
    each_vector(0, args.count, [&](int64_t i, auto n) {
      store(scores + i, set1(1.0f) / (set1(1.0f) + exp(zero() - load(logits + i, n))), n);
    });
    return;
  }
  float peak = logits[0], total = 0;
  for (int64_t i = 1; i < args.count; i++) peak = logits[i] > peak || logits[i] != logits[i] ? logits[i] : peak;
  each_vector(0, args.count, [&](int64_t i, auto n) { store(scores + i, exp(load(logits + i, n) - set1(peak)), n); });
  for (int64_t i = 0; i < args.count; i++) total += scores[i];
  for (int64_t i = 0; i < args.count; i++) scores[i] /= total;
}

// The order of torch.topk: NaN is larger than all numbers.
bool is_larger(float a, float b) { return a > b || (a != a && b == b); }

// A sorted list of the largest values so far, largest first; of equal values the first one is ahead.
struct Best {
  int32_t* ids;
  float* values;
  int64_t size, limit;

  void add(int32_t id, float value) {
    if (size == limit && !is_larger(value, values[size - 1])) return;
    int64_t place = size < limit ? size++ : size - 1;
    for (; place > 0 && is_larger(value, values[place - 1]); place--) {
      ids[place] = ids[place - 1];
      values[place] = values[place - 1];
    }
    ids[place] = id;
    values[place] = value;
  }
};

// The score of the experts [begin, end): the largest value, or the sum of the two largest.
float group_score(const RouteArgs& args, const float* values, int64_t begin, int64_t end) {
  int32_t ids[2];
  float top[2];
  Best best{ids, top, 0, args.top2 ? 2 : 1};
  for (int64_t i = begin; i < end; i++) best.add((int32_t)i, values[i]);
  return best.size == 2 ? top[0] + top[1] : top[0];
}

// The weights of a token are divided by this number at least: the quotient of tiny sums is infinite.
constexpr float MIN_DIVISOR = 1e-20f;

// Memory of a worker for one token.
struct RouteMemory {
  float *scores, *values, *chosen_values, *group_values;
  int32_t* groups;
};

void route_token(const RouteArgs& args, int64_t token, const RouteMemory& memory) {
  score_experts(args, args.logits + token * args.stride, memory.scores);
  const float* values = memory.scores;
  if (args.correction) {
    for (int64_t i = 0; i < args.count; i++) memory.values[i] = memory.scores[i] + args.correction[i];
    values = memory.values;
  }
  int32_t* experts = args.experts + token * args.top_k;
  Best best{experts, memory.chosen_values, 0, args.top_k};
  int64_t size = args.count / args.groups;
  if (args.groups == 1) {
    for (int64_t i = 0; i < args.count; i++) best.add((int32_t)i, values[i]);
  } else {
    Best groups{memory.groups, memory.group_values, 0, args.top_groups};
    for (int64_t group = 0; group < args.groups; group++)
      groups.add((int32_t)group, group_score(args, values, group * size, (group + 1) * size));
    for (int64_t group = 0; group < args.groups; group++) {  // in order: among equal scores, the first one wins
      bool chosen = false;
      for (int64_t i = 0; i < groups.size; i++) chosen |= groups.ids[i] == group;
      for (int64_t i = group * size; chosen && i < (group + 1) * size; i++) best.add((int32_t)i, values[i]);
    }
  }
  float total = 0, *weights = args.weights + token * args.top_k;
  for (int64_t c = 0; c < args.top_k; c++) total += memory.scores[experts[c]];
  float divisor = total < MIN_DIVISOR ? MIN_DIVISOR : total;  // NaN stays NaN
  float factor = args.renormalise ? args.scale / divisor : args.scale;
  for (int64_t c = 0; c < args.top_k; c++) weights[c] = memory.scores[experts[c]] * factor;
}

}  // namespace

void route(const RouteArgs& args, const Worker& worker) {
  float* scores = (float*)worker.scratch((2 * args.count + args.top_k + 2 * args.groups) * sizeof(float));
  float* values = scores + args.count;
  float* chosen_values = values + args.count;
  float* group_values = chosen_values + args.top_k;
  RouteMemory memory{scores, values, chosen_values, group_values, (int32_t*)(group_values + args.groups)};
  Share share = share_of(args.tokens, worker);
  for (int64_t token = share.begin; token < share.end; token++) route_token(args, token, memory);
}

}  // namespace localllm::VARIANT
