// RMS norm of groups with a gate, before or after the norm.
#include "../layers/gate.h"
#include "../vectors/convert.h"

namespace localllm::VARIANT {
namespace {

// y = x * silu(gate) or x. Returns the sum of y².
template <class T>
float gated_squares(const T* x, const T* gate, float* y, int64_t dim, bool gated) {
  F32 squares = zero();
  each_vector(0, dim, [&](int64_t i, auto n) {
    F32 value = gated ? load(x + i, n) * silu(load(gate + i, n)) : load(x + i, n);
    store(y + i, value, n);
    squares = fma(value, value, squares);
  });
  return sum(squares);
}

template <class T>
void groups(const GatedNormArgs& args, Share share, const float* weights, float* y) {
  bool gate_first = args.order == GateOrder::gate_norm;
  for (long item = share.begin; item < share.end; item++) {
    int64_t token = item / args.groups, group = item % args.groups;
    const T* gate = (const T*)args.gate + token * args.gate_stride + group * args.dim;
    const T* x = (const T*)args.x + token * args.x_stride + group * args.dim;
    const float* weight = weights + (args.shared_weight ? 0 : group * args.dim);
    T* out = (T*)args.out + item * args.dim;
    F32 scale = set1(1.0f / sqrtf(gated_squares(x, gate, y, args.dim, gate_first) / (float)args.dim + args.eps));
    each_vector(0, args.dim, [&](int64_t i, auto n) {
      F32 value = load(y + i, n) * scale * load(weight + i, n);
      store(out + i, gate_first ? value : value * silu(load(gate + i, n)), n);
    });
  }
}

}  // namespace

void gated_norm(const GatedNormArgs& args, const Worker& worker) {
  Share share = share_of(args.tokens * args.groups, worker);
  int64_t weights = args.shared_weight ? args.dim : args.groups * args.dim;
  float* memory = (float*)worker.scratch((weights + args.dim) * sizeof(float));
  widen(args.weight_type, args.weight, 0, memory, weights);
  switch (args.type) {
    case Type::f32: return groups<float>(args, share, memory, memory + weights);
    case Type::bf16: return groups<bf16>(args, share, memory, memory + weights);
    case Type::f16: return groups<f16>(args, share, memory, memory + weights);
  }
}

}  // namespace localllm::VARIANT
