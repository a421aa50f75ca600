// A decoder layer in one run of the team: what would be nine forks and joins are barriers.
#pragma once

#include "kernels.h"

namespace localllm {

// The arguments of each part, in the order in which they are computed. Their pointers already lead from one part to
// the next, and those that need shared memory may all be handed the same: no two parts are under way at once.
struct LayerArgs {
  NormArgs before_attention;  // takes x into the residual stream
  LinearArgs qkv;
  AppendArgs append;
  AttentionArgs attention;
  LinearArgs out;
  NormArgs after_attention;  // weight null: none
  NormArgs before_mlp;       // takes the attention's answer into the residual stream
  LinearArgs gate_up;
  ActivationArgs gate;
  LinearArgs down;
  NormArgs after_mlp;  // weight null: none
};

// Bytes of shared memory that every part of the layer can do with.
size_t layer_shared(const Lane& lane, const LayerArgs& args, int workers);

void layer(const Lane& lane, const LayerArgs& args, const Worker& worker);

}  // namespace localllm
