// The kernels of e4m3 weights.
#include "product.cuh"

namespace localllm::cuda {

template void product_of<E4m3<false>>(const ProductArgs&, cudaStream_t);
template void product_of<E4m3<true>>(const ProductArgs&, cudaStream_t);

}  // namespace localllm::cuda
