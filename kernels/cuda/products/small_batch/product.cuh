// Converts ProductArgs to the arguments of the small-batch kernel in one weight format, and starts it.
#pragma once

#include <type_traits>

#include "../product.h"
#include "launch.cuh"

namespace localllm::cuda {

template <class F>
static inline SmallBatch small_batch_of(const ProductArgs& args) {
  SmallBatch a{};
  a.out = args.out;
  a.x = args.x;
  a.weight = static_cast<const uint8_t*>(args.weight);
  a.records = static_cast<const uint32_t*>(args.records);
  a.scale = args.scale;
  a.bias = args.bias;
  a.out_type = args.out_type;
  a.bias_type = args.bias_type;
  a.rows = int(args.rows), a.out_features = int(args.out_features), a.in_features = int(args.in_features),
  a.group = int(args.group);
  a.row_bytes = args.row_bytes;
  a.x_stride = args.x_stride;
  a.out_stride = args.out_stride;
  a.resident = args.resident;
  a.gated = args.gated ? int(args.out_features / 2) : 0;
  a.gate = Activation(args.gate);
  a.stream = args.stream;
  a.stream_out = args.stream_out;
  a.norm = args.norm;
  a.norm_type = args.norm_type;
  a.eps = args.eps;
  a.offset = args.offset;
  a.lora = args.lora;
  Subgroups subgroups = subgroups_of(F::TRAITS, args.in_features, args.group);
  a.chunks_per_subgroup = subgroups.chunks_per_subgroup;
  a.subgroups = subgroups.subgroups;
  a.prepared_pitch = prepared_pitch(F::TRAITS, shape_of(a));
  return a;
}

template <class F>
constexpr bool HAS_LORA = std::is_same_v<F, Bf16>;  // formats whose kernel adds a LoRA product

template <class F>
constexpr bool ROUNDED = sizeof(typename F::X) == 1;

template <class F>
int64_t shared_of(const ProductArgs& args) {
  SmallBatch a = small_batch_of<F>(args);
  if (!ROUNDED<F> || a.prepared_pitch) return 0;
  return args.rows * (round_up(args.in_features, 16) + 4 * (F::ROUNDED_IN_GROUPS ? a.subgroups : 1));
}

template <class F>
void product_of(const ProductArgs& args, cudaStream_t stream) {
  SmallBatch a = small_batch_of<F>(args);
  if (a.norm && !a.prepared_pitch) throw std::runtime_error("linear: too many activations for a fused norm");
  if (ROUNDED<F> && !a.prepared_pitch) {
    int64_t padded = round_up(args.in_features, 16);
    auto* integers = static_cast<int8_t*>(args.shared);
    auto* scales = reinterpret_cast<float*>(integers + args.rows * padded);
    int64_t subgroup = F::ROUNDED_IN_GROUPS ? 128 / F::RECORDS : 0;
    RowArgs rows{integers, scales, args.x, args.rows, args.in_features, padded, args.x_stride};
    rows.group = F::ROUNDED_IN_GROUPS ? args.group : args.in_features;
    rows.subgroup = subgroup;
    round_rows(rows, stream);
    a.x = integers;
    a.x_stride = padded;
    (F::ROUNDED_IN_GROUPS ? a.subgroup_scale : a.row_scale) = scales;
  }
  if constexpr (HAS_LORA<F>)
    if (a.lora.inner) return start_small_batch<F, true>(a, stream);
  start_small_batch<F, false>(a, stream);
}

}  // namespace localllm::cuda
