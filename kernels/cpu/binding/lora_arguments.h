// Checks the arguments of the LoRA ops and converts them to kernel arguments. A failed check throws std::runtime_error.
#pragma once

#include <vector>

#include "arguments.h"

namespace localllm {

// The factors of a projection: a [slots, slices * rank, in_features], b [slots, sum of widths, rank], and the outputs
// of each slice. The other fields stay zero.
LoraArgs lora_factors(const Op& op, const Tensor& a, const Tensor& b, const std::vector<int64_t>& widths);

// Stores the tiles of a step in `args`, for factors of `slots` slots: scales and order [tokens], starts [tiles + 1],
// tile_slots [tiles]. `order` has each token once. Does not check values on a CUDA device.
void lora_tiles(const Op& op, LoraArgs& args, int64_t slots, int64_t tokens, const Tensor& scales, const Tensor& order,
                const Tensor& starts, const Tensor& tile_slots);

// The number of elements of `inner` for `tokens` tokens.
int64_t lora_inner(const LoraArgs& args, int64_t tokens);

}  // namespace localllm
