#include "layer.h"

#include <algorithm>

namespace localllm {

size_t layer_shared(const Variant& variant, const LayerArgs& args, int workers) {
  return std::max({
      variant.linear_shared(args.qkv, workers),
      variant.attention_shared(args.attention, workers),
      variant.linear_shared(args.out, workers),
      variant.linear_shared(args.gate_up, workers),
      variant.linear_shared(args.down, workers),
  });
}

void layer(const Variant& variant, const LayerArgs& args, const Worker& worker) {
  variant.rms_norm(args.before_attention, worker);
  worker.barrier();
  variant.linear(args.qkv, worker);
  worker.barrier();
  variant.append(args.append, worker);
  worker.barrier();
  variant.attention(args.attention, worker);
  worker.barrier();
  variant.linear(args.out, worker);
  worker.barrier();
  if (args.after_attention.weight) {
    variant.rms_norm(args.after_attention, worker);
    worker.barrier();
  }
  variant.rms_norm(args.before_mlp, worker);
  worker.barrier();
  variant.linear(args.gate_up, worker);
  worker.barrier();
  variant.gate(args.gate, worker);
  worker.barrier();
  variant.linear(args.down, worker);
  if (args.after_mlp.weight) {
    worker.barrier();
    variant.rms_norm(args.after_mlp, worker);
  }
}

}  // namespace localllm
