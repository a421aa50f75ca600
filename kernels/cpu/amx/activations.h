// Copies activations to the tile layout (plan.h). For int8 and int4 weights it also quantises them to int8.
#pragma once

#include "plan.h"

namespace localllm::VARIANT {

typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef float Reals __attribute__((vector_size(WIDTH * 4)));
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));

static inline void store_int8(int8_t* to, F32 x) {  // x has integer values; the result for NaN is undefined
  Bytes bytes = __builtin_convertvector(__builtin_convertvector((Reals)x.v, Ints), Bytes);
  memcpy(to, &bytes, sizeof bytes);
}

// Quantises one group of a row, `count` inputs, to int8 (as `rounded` of kernels/ops/linear_int8.py). Writes step `i`
// of the group to address(i). Returns the scale, or NaN if the group has a NaN or an infinity.
template <class T, class Address>
static inline float quantise_group(const T* x, int64_t count, const Plan& plan, Address address) {
  F32 high = zero(), low = zero(), not_finite = zero();
  for (int64_t k = 0; k < count; k += WIDTH) {
    F32 values = count - k >= WIDTH ? load(x + k) : load(x + k, (int)(count - k));
    high = max(high, values);
    low = min(low, values);
    not_finite = fma(values, zero(), not_finite);
  }
  float top = largest(high), bottom = -largest(zero() - low), magnitude = top > -bottom ? top : -bottom;
  bool finite = sum(not_finite) == 0;
  F32 factor = set1(finite && magnitude > 0 ? 127.0f / magnitude : 0.0f);
  for (int64_t step = 0; step < plan.group_steps; step++) {
    int8_t* to = address(step);
    for (int64_t k = 0; k < plan.depth; k += WIDTH) {
      int64_t left = count - step * plan.depth - k;
      const T* from = x + step * plan.depth + k;
      F32 values = left >= WIDTH ? load(from) : left > 0 ? load(from, (int)left) : zero();
      store_int8(to + k, finite ? round(values * factor) : zero());
    }
  }
  return finite ? magnitude / 127.0f : NAN;
}

template <class T>
static inline void quantise_row(const T* x, int64_t row, const LinearArgs& args, const Plan& plan) {
  float* scales = (float*)((uint8_t*)args.shared + plan.scales_offset());
  scales += row / BLOCK * plan.groups * BLOCK + row % BLOCK;
  for (int64_t group = 0; group < plan.groups; group++) {
    int64_t first = group * plan.group_steps * plan.step, left = row < args.rows ? args.in_features - first : 0;
    int64_t width = plan.group_steps * plan.step, count = left < width ? left : width;
    scales[group * BLOCK] = quantise_group(x + first, count, plan, [&](int64_t step) {
      return (int8_t*)args.shared + plan.offset(row / BLOCK, group * plan.group_steps + step) + row % BLOCK * plan.depth;
    });
  }
}

static inline void copy_row(const bf16* x, int64_t row, const LinearArgs& args, const Plan& plan) {
  for (int64_t step = 0; step < plan.steps; step++) {
    uint8_t* to = (uint8_t*)args.shared + plan.offset(row / BLOCK, step) + row % BLOCK * plan.depth;
    int64_t left = row < args.rows ? args.in_features - step * plan.step : 0;
    if (left < plan.step) memset(to, 0, plan.depth);
    if (left > 0) memcpy(to, x + step * plan.step, (left < plan.step ? left : plan.step) * sizeof(bf16));
  }
}

// Copies x to args.shared in the tile layout. Padding rows of the last tile are zero.
static inline void arrange(const LinearArgs& args, const Plan& plan, const Worker& worker) {
  Share rows = share_of(round_up(args.rows, TILE_ROWS), worker);
  for (int64_t row = rows.begin; row < rows.end; row++) {
    int64_t offset = (row < args.rows ? row : 0) * args.x_stride;
    if (plan.product == Product::bf16) copy_row((const bf16*)args.x + offset, row, args, plan);
    else if (args.x_type == Type::f32) quantise_row((const float*)args.x + offset, row, args, plan);
    else if (args.x_type == Type::bf16) quantise_row((const bf16*)args.x + offset, row, args, plan);
    else quantise_row((const f16*)args.x + offset, row, args, plan);
  }
}

}  // namespace localllm::VARIANT
