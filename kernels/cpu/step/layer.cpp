#include "layer.h"

#include <algorithm>

namespace localllm {

size_t layer_shared(const Variant& variant, const LayerArgs& args, int workers) {
  size_t attention = std::max({
      variant.linear_shared(args.qkv, workers),
      variant.attention_shared(args.attention, workers),
      variant.linear_shared(args.out, workers),
  });
  if (!args.has_mlp) return attention;
  return std::max({attention, variant.linear_shared(args.gate_up, workers), variant.linear_shared(args.down, workers)});
}

namespace {

// A product, and the LoRA products of the same inputs.
void project(const Variant& variant, const LinearArgs& linear, const LoraArgs& lora, const Worker& worker) {
  if (lora.tiles) variant.lora_shrink(lora, worker);
  variant.linear(linear, worker);
  if (!lora.tiles) return;
  worker.barrier();
  variant.lora_expand(lora, worker);
}

}  // namespace

void layer(const Variant& variant, const LayerArgs& args, const Worker& worker) {
  variant.rms_norm(args.before_attention, worker);
  worker.barrier();
  project(variant, args.qkv, args.qkv_lora, worker);
  worker.barrier();
  variant.append(args.append, worker);
  worker.barrier();
  variant.attention(args.attention, worker);
  worker.barrier();
  project(variant, args.out, args.out_lora, worker);
  worker.barrier();
  if (args.after_attention.weight) {
    variant.rms_norm(args.after_attention, worker);
    worker.barrier();
  }
  variant.rms_norm(args.before_mlp, worker);
  if (!args.has_mlp) return;
  worker.barrier();
  project(variant, args.gate_up, args.gate_up_lora, worker);
  worker.barrier();
  variant.gate(args.gate, worker);
  worker.barrier();
  project(variant, args.down, args.down_lora, worker);
  if (args.after_mlp.weight) {
    worker.barrier();
    variant.rms_norm(args.after_mlp, worker);
  }
}

}  // namespace localllm
