// The tiled kernels of int4 weights with int8 activations (W4A8).
#include "product.cuh"

namespace localllm::cuda {

TILED_FORMAT(TiledInt4<1>)
TILED_FORMAT(TiledInt4<2>)
TILED_FORMAT(TiledInt4<4>)

}  // namespace localllm::cuda
