// Linear layers for 1 to 16 rows: the arguments and entry points that all weight formats share.
#pragma once

#include "lora.h"

namespace localllm::cuda {

enum class Weights : int { bf16 = 0, int8 = 1, int4 = 2, int4_wide = 3, fp8 = 4 };

struct ProductArgs {
  void* out;            // [rows, out_features], or [rows, out_features / 2] with a gate
  const void* x;        // [rows, in_features] bf16
  const void* weight;   // [out_features, row_bytes]; padding after the last input is zero
  const void* records;  // scales and zero points of groups (formats.cuh); null: none
  const float* scale;   // [out_features]; null: none
  const void* bias;     // [out_features]; null: none
  Type out_type, bias_type;
  Weights format;
  int64_t rows, out_features, in_features, group, row_bytes, x_stride, out_stride;
  bool resident;  // true: no kernel in the stream writes the weights, so they are prefetched before wait_for_previous
  bool gated;     // out[r, i] = gate(y[r, i]) * y[r, out_features / 2 + i]; y and gate(y) are rounded to bf16 first
  Activation gate;
  const void* stream;  // residual stream [rows, in_features] bf16; stream_out = x + stream is normalised; null: none
  void* stream_out;
  const void* norm;  // weight of the norm [in_features]; null: x is multiplied without a norm
  Type norm_type;
  float eps, offset;
  LoraTerm lora;  // only with bf16 weights and without a gate
  void* shared;   // scratch memory, product_shared(args) bytes
};

// True if the current GPU has enough shared memory for a product of this shape. `normed`: the norm is fused.
bool product_fits(const ProductArgs& args, bool normed);

// Bytes of scratch memory for rounded activations; 0 if each block prepares the activations in shared memory.
int64_t product_shared(const ProductArgs& args);
void product(const ProductArgs& args, cudaStream_t stream);

// The Hopper kernel for one row with int8 or int4 weights (one_row.cu). Both functions return false if the kernel does
// not support `args`.
bool takes_one_row(const ProductArgs& args);
bool one_row(const ProductArgs& args, cudaStream_t stream);

// Rounds x to int8 in groups of inputs (kernels/ops/linear_int8.py).
struct RoundArgs {
  int8_t* out;      // [rows, padded], zeros after the last input
  float* scales;    // [rows, subgroups]: per `subgroup` inputs, the scale of their group; subgroup == 0: [rows]
  const void* x;
  Type type;
  int64_t rows, in_features, padded, x_stride, group, subgroup;
};
void round_rows(const RoundArgs& args, cudaStream_t stream);

}  // namespace localllm::cuda
