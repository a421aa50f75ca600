// Dispatch of linear layers for 1 to 16 rows by weight format, and the kernels of bf16 weights.
#include "product.cuh"

namespace localllm::cuda {

namespace {

template <bool WIDE, class Call>
auto with_groups(int64_t group, int64_t in_features, Call&& call) {
  if (group % 128 == 0 || group >= in_features) return call(Nibbles<WIDE, 1>{});
  return group % 64 == 0 ? call(Nibbles<WIDE, 2>{}) : call(Nibbles<WIDE, 4>{});
}

template <class Call>
auto with_format(const ProductArgs& args, Call&& call) {
  switch (args.format) {
    case Weights::bf16: return call(Bf16{});
    case Weights::int8: return call(Int8{});
    case Weights::int4: return with_groups<false>(args.group, args.in_features, call);
    case Weights::int4_wide: return with_groups<true>(args.group, args.in_features, call);
    default: return args.group < args.in_features ? call(E4m3<true>{}) : call(E4m3<false>{});
  }
}

}  // namespace

extern template void product_of<Int8>(const ProductArgs&, cudaStream_t);
extern template void product_of<Nibbles<false, 1>>(const ProductArgs&, cudaStream_t);
extern template void product_of<Nibbles<false, 2>>(const ProductArgs&, cudaStream_t);
extern template void product_of<Nibbles<false, 4>>(const ProductArgs&, cudaStream_t);
extern template void product_of<Nibbles<true, 1>>(const ProductArgs&, cudaStream_t);
extern template void product_of<Nibbles<true, 2>>(const ProductArgs&, cudaStream_t);
extern template void product_of<Nibbles<true, 4>>(const ProductArgs&, cudaStream_t);
extern template void product_of<E4m3<false>>(const ProductArgs&, cudaStream_t);
extern template void product_of<E4m3<true>>(const ProductArgs&, cudaStream_t);

template void product_of<Bf16>(const ProductArgs&, cudaStream_t);

bool product_fits(const ProductArgs& args, bool normed) {
  return with_format(args, [&](auto format) {
    using F = decltype(format);
    return fits(F::TRAITS, shape_of(small_batch_of<F>(args)), normed, limits());
  });
}

int64_t product_shared(const ProductArgs& args) {
  if (takes_one_row(args)) return 0;
  return with_format(args, [&](auto format) { return shared_of<decltype(format)>(args); });
}

void product(const ProductArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.out_features == 0 || one_row(args, stream)) return;
  with_format(args, [&](auto format) { product_of<decltype(format)>(args, stream); });
}

}  // namespace localllm::cuda
