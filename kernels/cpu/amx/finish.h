// Writes a block of sums to the output: converts integers to float, applies scales and bias, converts to the output
// type.
#pragma once

#include "plan.h"

namespace localllm::VARIANT {

typedef int32_t SumInts __attribute__((vector_size(WIDTH * 4)));
typedef float SumFloats __attribute__((vector_size(WIDTH * 4)));

template <Product product>
static inline F32 number(const float* sums) {
  if constexpr (product == Product::bf16) return load(sums);
  SumInts integers;
  memcpy(&integers, sums, sizeof integers);
  SumFloats floats = __builtin_convertvector(integers, SumFloats);
  F32 out;
  memcpy(&out.v, &floats, sizeof floats);
  return out;
}

template <Product product, class Out>
static inline void finish_rows(const LinearArgs& args, int64_t block, int64_t panel, const float* sums,
                               const float* row_scales, const float* column_scales) {
  int64_t rows = args.rows - block * BLOCK, columns = args.out_features - panel * PANEL;
  if (rows > BLOCK) rows = BLOCK;
  Out* out = (Out*)args.out + block * BLOCK * args.out_stride + panel * PANEL;
  for (int64_t j = 0; j < PANEL && j < columns; j += WIDTH) {
    int width = columns - j < WIDTH ? (int)(columns - j) : WIDTH;
    F32 bias = zero();
    if (args.bias) {
      const float* biases = args.bias + panel * PANEL + j;
      bias = width == WIDTH ? load(biases) : load(biases, width);
    }
    F32 scale = column_scales ? load(column_scales + j) : set1(1.0f);
    for (int64_t row = 0; row < rows; row++) {
      F32 factor = row_scales ? scale * set1(row_scales[row]) : scale;
      F32 value = fma(number<product>(sums + row * PANEL + j), factor, bias);
      Out* to = out + row * args.out_stride + j;
      if (width == WIDTH)
        store(to, value);
      else
        store(to, value, width);
    }
  }
}

// `row_scales` and `column_scales` [32] are null if the sums are already scaled.
template <Product product>
static inline void finish(const LinearArgs& args, int64_t block, int64_t panel, const float* sums,
                          const float* row_scales, const float* column_scales) {
  switch (args.out_type) {
    case Type::f32: return finish_rows<product, float>(args, block, panel, sums, row_scales, column_scales);
    case Type::bf16: return finish_rows<product, bf16>(args, block, panel, sums, row_scales, column_scales);
    case Type::f16: return finish_rows<product, f16>(args, block, panel, sums, row_scales, column_scales);
  }
}

}  // namespace localllm::VARIANT
