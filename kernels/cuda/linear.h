// Products with weights of every format, of 1 to 16 rows: what is the same for all of them.
#pragma once

#include "kernels.h"

namespace localllm::cuda {

enum class Weights : int { bf16 = 0, int8 = 1, int4 = 2, int4_wide = 3, fp8 = 4 };

struct ProductArgs {
  void* out;           // [rows, outs], or [rows, outs / 2] with a gate
  const void* x;       // [rows, ins] bf16
  const void* weight;  // [outs, row_bytes]; bytes beyond ins are zeros
  const void* records;  // formats.cuh; null: none
  const float* scale;   // [outs]; null: none
  const void* bias;     // [outs]; null: none
  Type out_type, bias_type;
  Weights format;
  int64_t rows, outs, ins, group, row_bytes, x_stride, out_stride;
  bool resident;  // nothing in the stream still writes the weights
  bool gated;     // out[r, i] = gate(sum i) * (sum outs / 2 + i), each rounded to bf16 first
  Activation gate;
  const void* stream;  // [rows, ins] bf16: x + stream is normalised, and goes to stream_out; null: none
  void* stream_out;
  const void* norm;  // [ins]; null: x as it is
  Type norm_type;
  float eps, offset;
  void* shared;  // product_shared(args) bytes
};

// Whether the current GPU has the shared memory for a product of this shape, with a norm or without.
bool product_fits(const ProductArgs& args, bool normed);

// Scratch memory that a product needs; 0 where blocks make their activations ready themselves.
int64_t product_shared(const ProductArgs& args);
void product(const ProductArgs& args, cudaStream_t stream);

// One row with int8 or int4 weights, on Hopper; false where it is not of that kind (one_row.cu).
bool takes_one_row(const ProductArgs& args);
bool one_row(const ProductArgs& args, cudaStream_t stream);

struct RoundArgs {  // x, in groups of inputs, to int8 (kernels/ops/linear_int8.py)
  int8_t* out;      // [rows, padded], zeros behind the last input
  float* scales;    // [rows, ceil(ins / sub)], the scale of the group that each `sub` inputs are of; sub 0: [rows]
  const void* x;
  Type type;
  int64_t rows, ins, padded, x_stride, group, sub;
};
void round_rows(const RoundArgs& args, cudaStream_t stream);

}  // namespace localllm::cuda
