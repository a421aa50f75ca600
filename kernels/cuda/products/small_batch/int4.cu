// The kernels of int4 weights with int8 activations, one scale per group (W4A8).
#include "product.cuh"

namespace localllm::cuda {

template void product_of<Nibbles<false, 1>>(const ProductArgs&, cudaStream_t);
template void product_of<Nibbles<false, 2>>(const ProductArgs&, cudaStream_t);
template void product_of<Nibbles<false, 4>>(const ProductArgs&, cudaStream_t);

}  // namespace localllm::cuda
