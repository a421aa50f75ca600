// The tiled kernels of int4 weights with bf16 activations (W4A16).
#include "product.cuh"

namespace localllm::cuda {

TILED_FORMAT(TiledInt4Wide<1>)
TILED_FORMAT(TiledInt4Wide<2>)
TILED_FORMAT(TiledInt4Wide<4>)

}  // namespace localllm::cuda
