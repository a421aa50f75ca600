#include "layer.h"

#include <algorithm>

namespace localllm {

size_t layer_shared(const Lane& lane, const LayerArgs& args, int workers) {
  return std::max({
      lane.linear_shared(args.qkv, workers),
      lane.attention_shared(args.attention, workers),
      lane.linear_shared(args.out, workers),
      lane.linear_shared(args.gate_up, workers),
      lane.linear_shared(args.down, workers),
  });
}

void layer(const Lane& lane, const LayerArgs& args, const Worker& worker) {
  lane.rms_norm(args.before_attention, worker);
  worker.barrier();
  lane.linear(args.qkv, worker);
  worker.barrier();
  lane.append(args.append, worker);
  worker.barrier();
  lane.attention(args.attention, worker);
  worker.barrier();
  lane.linear(args.out, worker);
  worker.barrier();
  if (args.after_attention.weight) {
    lane.rms_norm(args.after_attention, worker);
    worker.barrier();
  }
  lane.rms_norm(args.before_mlp, worker);
  worker.barrier();
  lane.linear(args.gate_up, worker);
  worker.barrier();
  lane.gate(args.gate, worker);
  worker.barrier();
  lane.linear(args.down, worker);
  if (args.after_mlp.weight) {
    worker.barrier();
    lane.rms_norm(args.after_mlp, worker);
  }
}

}  // namespace localllm
