// The kernels of int4 weights with bf16 activations (W4A16).
#include "product.cuh"

namespace localllm::cuda {

template void product_of<Nibbles<true, 1>>(const ProductArgs&, cudaStream_t);
template void product_of<Nibbles<true, 2>>(const ProductArgs&, cudaStream_t);
template void product_of<Nibbles<true, 4>>(const ProductArgs&, cudaStream_t);

}  // namespace localllm::cuda
