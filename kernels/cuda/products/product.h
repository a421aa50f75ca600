// Products with packed weights: the arguments and entry points that all weight formats share.
#pragma once

#include "../lora/products.h"

namespace localllm::cuda {

// Only choice_products supports mxfp4. Only tiled_product supports fp8_rounded: fp8 weights, and activations that may be
// rounded to e4m3.
enum class Weights : int { bf16 = 0, int8 = 1, int4 = 2, int4_wide = 3, fp8 = 4, mxfp4 = 5, fp8_rounded = 6 };

struct ProductArgs {
  void* out;            // [rows, out_features], or [rows, out_features / 2] with a gate
  const void* x;        // [rows, in_features] bf16
  const void* weight;   // [out_features, row_bytes]; padding after the last input is zero
  // Scales and zero points of groups (small_batch/formats.cuh); mxfp4: the exponents (kernels/ops/linear_mxfp4.py);
  // null: none
  const void* records;
  const float* scale;   // [out_features]; null: none
  const void* bias;     // [out_features]; null: none
  Type out_type, bias_type;
  Weights format;
  int64_t rows, out_features, in_features, group, row_bytes, x_stride, out_stride;
  bool resident;  // true: no kernel in the stream writes the weights, so they are prefetched before wait_for_previous
  bool gated;     // out[r, i] = gate(y[r, i]) * y[r, out_features / 2 + i]; y and gate(y) are rounded to bf16 first
  ExpertGate gate;  // clamped_swiglu: of choice_products only
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

// The kernels for one row with quantised weights (one_row/one_row.cu). Both functions return false if these kernels do not
// support `args`.
bool takes_one_row(const ProductArgs& args);
bool one_row(const ProductArgs& args, cudaStream_t stream);

// Products of a mixture of experts: row c of `out` is a row of x times the weights of the expert of choice c.
struct ChoiceArgs {
  ProductArgs product;     // of one row and of one expert: choice 0 and expert 0; without norm and LoRA product
  const int32_t* experts;  // [choices]: the weights of expert e begin at output e * out_features
  int64_t choices;
  int64_t choices_per_row;  // choice c multiplies row c / choices_per_row of x
  // True: `experts` and weights are read before wait_for_previous. A kernel before the previous one wrote them, and all
  // threads of the previous kernel call wait_for_previous before launch_dependents, as the kernel of choice_products does.
  bool early;
};

// For int8, int4, int4_wide, fp8 and mxfp4 weights. Returns false if the kernel does not support `args`.
bool choice_products(const ChoiceArgs& args, cudaStream_t stream);

// The kernel for one row with int4 weights on Hopper (one_row/hopper.cu), for arguments that one_row supports. Returns
// false on other GPUs, and if the GPU has too little shared memory.
bool one_row_hopper(const ProductArgs& args, cudaStream_t stream);

// The tiled kernels (tiled/kernel.cuh), for int8, int4 and fp8 weights, without norm, gate and LoRA product.
// `args.shared` has tiled_shared(args) bytes. `arrivals`: zeros (device/counters.h), zero again after the product.
int64_t tiled_shared(const ProductArgs& args);
void tiled_product(const ProductArgs& args, int32_t* arrivals, cudaStream_t stream);

// Inputs of an output that share a record (small_batch/formats.cuh) or, without records, a scale.
inline int64_t record_inputs(const ProductArgs& args) {
  if (args.format != Weights::int4 && args.format != Weights::int4_wide) return args.group;
  return args.group >= args.in_features || args.group % 128 == 0 ? 128 : args.group % 64 == 0 ? 64 : 32;
}

// Dequantises the outputs from number `first` on, a multiple of 8, of an int4 or fp8 weight into args.out
// [args.rows, in_features] bf16, dense and aligned to 16 bytes. `args` has no activations.
void widen(const ProductArgs& args, int64_t first, cudaStream_t stream);

// The order of inputs in prepared activations. even_first: in every 32 inputs the even ones come first. pairs: in every
// 16 inputs, 2 inputs of 4 come first. nibbles: in every 32 inputs, the order in which int4_wide unpacks a word.
enum class InputOrder { natural, even_first, pairs, nibbles };

// Activations that a separate kernel prepares for a product.
struct RowArgs {
  void* out;         // [rows, padded] int8 or bf16, zeros after the last input; padded: a multiple of 32 if reordered
  // [rows, subgroups] or, with a scale_pitch, [subgroups, scale_pitch]; subgroup == 0: [rows]. null: round_rows multiplies
  // the integers by their scales and stores bf16.
  float* scales;
  const void* x;     // [rows, x_stride] bf16; vectors of 8 inputs are aligned
  int64_t rows, in_features, padded, x_stride;
  int64_t group;     // inputs that share a scale
  int64_t subgroup;  // inputs per stored scale; 0: one scale per row is stored
  int64_t scale_pitch;
  InputOrder order;
  bool e4m3;  // round_rows rounds to e4m3 instead of int8; the largest magnitude becomes 448
};

// True if the kernel holds a row in registers, which is faster. `rounded`: for round_rows.
bool prepares_in_registers(const RowArgs& args, bool rounded);

// Rounds x to int8 in groups of inputs (kernels/ops/linear_int8.py), or as RowArgs says.
void round_rows(const RowArgs& args, cudaStream_t stream);

// Copies x in another order, without rounding.
void arrange_rows(const RowArgs& args, cudaStream_t stream);

}  // namespace localllm::cuda
