// LoRA products of decode steps: arguments and entry points.
#pragma once

#include "../kernels.h"

namespace localllm::cuda {

// A step multiplies in two kernels. lora_shrink computes the inner products of shares of the inputs; lora_expand adds
// up the shares and multiplies them by B. `args.inner` is [shares, tokens, slices * rank], in the order of the tokens.
struct LoraStep {
  LoraArgs args;
  const int32_t* slots;  // [tokens], adapter slot of each token; 0: no adapter
  int64_t slot_count, tokens;
  int chunk;   // limit of the tokens of a tile
  int shares;  // number of shares of the inputs
  bool adds;   // true: lora_expand adds to out; false: it writes out, and zeros for tokens without an adapter
};

// No kernel that is still running may write the factors, the slots or the tiles: the kernels read them before they wait
// for the kernels ahead.
void lora_shrink(const LoraStep& step, cudaStream_t stream);
void lora_expand(const LoraStep& step, cudaStream_t stream);

// The LoRA product that a small-batch product (products/product.h) adds to its outputs, from the results of lora_shrink.
struct LoraTerm {
  const float* inner;    // [shares, tokens, width]; null: no LoRA product
  const void* b;         // bf16 [slots, out_features, rank]; each slot is dense; rank is a multiple of 8
  const int32_t* slots;  // [tokens], adapter slot of each row; 0: no adapter
  int shares, width, rank, tokens, slot_count;
  int ends[2];           // slice s has the outputs below ends[s]; the last slice has the others
  int first;             // token of the first row
  int64_t b_stride;
};
constexpr int MAX_LORA_ROWS = 16;
constexpr int MAX_LORA_INNER = 1024;  // limit of rows * width

}  // namespace localllm::cuda
