// A decoder layer as one run of the team. Barriers between the kernels replace a fork and a join for each kernel.
#pragma once

#include "../kernels.h"

namespace localllm {

// The arguments of the kernels, in the order of execution. The output of one kernel is the input of the next. All
// kernels may use the same shared memory, because only one kernel runs at a time. Without `has_mlp` the layer ends with
// `before_mlp`, and the caller computes the MLP: a mixture of experts, for example.
struct LayerArgs {
  bool has_mlp;
  NormArgs before_attention;  // adds x to the residual stream and normalises
  LinearArgs qkv;
  LoraArgs qkv_lora;  // LoRA of the qkv product; every LoraArgs has tiles 0 in a step without adapters
  AppendArgs append;
  AttentionArgs attention;
  LinearArgs out;
  LoraArgs out_lora;
  NormArgs after_attention;  // its weight is null if the layer has no such norm
  NormArgs before_mlp;       // adds the attention output to the residual stream and normalises
  LinearArgs gate_up;
  LoraArgs gate_up_lora;
  ActivationArgs gate;
  LinearArgs down;
  LoraArgs down_lora;
  NormArgs after_mlp;  // its weight is null if the layer has no such norm
};

// Size of the shared memory in bytes: the maximum over the kernels of the layer.
size_t layer_shared(const Variant& variant, const LayerArgs& args, int workers);

void layer(const Variant& variant, const LayerArgs& args, const Worker& worker);

}  // namespace localllm
