// Dispatch of the tiled kernels by weight format, and the kernels of int8 weights and activations (W8A8).
#include "product.cuh"

namespace localllm::cuda {

namespace {

template <template <int> class F, class Call>
auto with_groups(const ProductArgs& args, Call&& call) {
  if (args.group % 128 == 0 || args.group >= args.in_features) return call(F<1>{});
  return args.group % 64 == 0 ? call(F<2>{}) : call(F<4>{});
}

constexpr int64_t MAX_INT8_ROWS = 64;  // rows of int4 products in int8 on Hopper

// True if an int4 product is faster with bf16 activations that have the values of the rounded ones: the scales of the
// groups take more time than bf16 instead of int8.
bool multiplies_in_bf16(const ProductArgs& args) {
  RowArgs rows{};
  rows.in_features = args.in_features;
  rows.padded = round_up(args.in_features, 128);
  rows.group = args.group;
  return uses_hopper_kernels(args.rows) && args.rows > MAX_INT8_ROWS && prepares_in_registers(rows, true);
}

template <class Call>
auto with_format(const ProductArgs& args, Call&& call) {
  switch (args.format) {
    case Weights::int8: return call(TiledInt8{});
    case Weights::int4:
      if (multiplies_in_bf16(args)) return with_groups<TiledInt4Wide>(args, call);
      return with_groups<TiledInt4>(args, call);
    case Weights::int4_wide: return with_groups<TiledInt4Wide>(args, call);
    case Weights::fp8_rounded:
      if (uses_hopper_kernels(args.rows)) return call(HopperFp8{});
      [[fallthrough]];
    case Weights::fp8: return args.group < args.in_features ? call(TiledFp8<true>{}) : call(TiledFp8<false>{});
    default: throw std::runtime_error("tiled_product: this weight format is not supported");
  }
}

}  // namespace

#define EXTERN_TILED(FORMAT)                                         \
  extern template int64_t tiled_shared_of<FORMAT>(const ProductArgs&); \
  extern template void tiled_product_of<FORMAT>(const ProductArgs&, int32_t*, cudaStream_t);

EXTERN_TILED(TiledInt4<1>)
EXTERN_TILED(TiledInt4<2>)
EXTERN_TILED(TiledInt4<4>)
EXTERN_TILED(TiledInt4Wide<1>)
EXTERN_TILED(TiledInt4Wide<2>)
EXTERN_TILED(TiledInt4Wide<4>)
EXTERN_TILED(TiledFp8<false>)
EXTERN_TILED(TiledFp8<true>)
EXTERN_TILED(HopperFp8)

TILED_FORMAT(TiledInt8)

int64_t tiled_shared(const ProductArgs& args) {
  return with_format(args, [&](auto format) { return tiled_shared_of<decltype(format)>(args); });
}

void tiled_product(const ProductArgs& args, int32_t* arrivals, cudaStream_t stream) {
  with_format(args, [&](auto format) { tiled_product_of<decltype(format)>(args, arrivals, stream); });
}

}  // namespace localllm::cuda
