// The tiled kernels of e4m3 weights with bf16 activations (W8A16), and with e4m3 activations (W8A8).
#include "product.cuh"

namespace localllm::cuda {

TILED_FORMAT(TiledFp8<false>)
TILED_FORMAT(TiledFp8<true>)
TILED_FORMAT(HopperFp8)

}  // namespace localllm::cuda
