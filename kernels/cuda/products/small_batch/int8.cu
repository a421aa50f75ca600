// The kernels of int8 weights with int8 activations (W8A8).
#include "product.cuh"

namespace localllm::cuda {

template void product_of<Int8>(const ProductArgs&, cudaStream_t);

}  // namespace localllm::cuda
