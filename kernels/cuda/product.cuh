// Converts ProductArgs to the arguments of the few-rows kernel in one weight format, and starts it.
#pragma once

#include "linear.h"
#include "plan.cuh"

namespace localllm::cuda {

template <class F>
static inline FewRows few_rows_of(const ProductArgs& args) {
  FewRows a{};
  a.out = args.out, a.x = args.x, a.weight = static_cast<const uint8_t*>(args.weight);
  a.records = static_cast<const uint32_t*>(args.records), a.scale = args.scale, a.bias = args.bias;
  a.out_type = args.out_type, a.bias_type = args.bias_type;
  a.rows = int(args.rows), a.outs = int(args.outs), a.ins = int(args.ins), a.group = int(args.group);
  a.row_bytes = args.row_bytes, a.x_stride = args.x_stride, a.out_stride = args.out_stride;
  a.resident = args.resident, a.gated = args.gated ? int(args.outs / 2) : 0, a.gate = args.gate;
  a.stream = args.stream, a.stream_out = args.stream_out, a.norm = args.norm, a.norm_type = args.norm_type;
  a.eps = args.eps, a.offset = args.offset;
  Subs subs = subs_of(F::TRAITS, args.ins, args.group);
  a.per_sub = subs.per_sub, a.subs = subs.subs;
  a.own_pitch = own_pitch(F::TRAITS, shape_of(a));
  return a;
}

template <class F>
constexpr bool ROUNDED = sizeof(typename F::X) == 1;

template <class F>
int64_t shared_of(const ProductArgs& args) {
  FewRows a = few_rows_of<F>(args);
  if (!ROUNDED<F> || a.own_pitch) return 0;
  return args.rows * (round_up(args.ins, 16) + 4 * (F::ROUNDED_IN_GROUPS ? a.subs : 1));
}

template <class F>
void product_of(const ProductArgs& args, cudaStream_t stream) {
  FewRows a = few_rows_of<F>(args);
  if (a.norm && !a.own_pitch) throw std::runtime_error("linear: too many activations for a fused norm");
  if (ROUNDED<F> && !a.own_pitch) {
    int64_t padded = round_up(args.ins, 16);
    auto* whole = static_cast<int8_t*>(args.shared);
    auto* scales = reinterpret_cast<float*>(whole + args.rows * padded);
    int64_t sub = F::ROUNDED_IN_GROUPS ? 128 / F::RECORDS : 0;
    round_rows({whole, scales, args.x, Type::bf16, args.rows, args.ins, padded, args.x_stride,
                F::ROUNDED_IN_GROUPS ? args.group : args.ins, sub},
               stream);
    a.x = whole, a.x_stride = padded;
    (F::ROUNDED_IN_GROUPS ? a.sub_scale : a.row_scale) = scales;
  }
  start_few_rows<F>(a, stream);
}

}  // namespace localllm::cuda
