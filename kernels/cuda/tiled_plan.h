// The choice of tiles and thread blocks of the tiled kernel (tiled.cuh). Plain C++, so that tests need no GPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace localllm::cuda {

constexpr int TILED_SHARED = 98 << 10;  // bytes: limit of a block's shared memory, for GPUs with 99 KB per block
constexpr int MAX_TILED_SLOTS = 4;      // slots of the ring buffer
constexpr int MIN_ITERATIONS = 4;       // iterations (chunks of 128 inputs) of a thread block that are worth its start
constexpr int HOPPER_SHARED = 220 << 10;  // bytes of shared memory per block that the kernels of Hopper need

// The thread blocks of a product, and how many of them share the tiles of the last, incomplete wave.
struct TiledBlocks {
  int blocks, sharers;
};

// `resident`: blocks that the GPU runs at the same time.
inline TiledBlocks blocks_of_product(int tiles, int chunks, int resident, int min_iterations = MIN_ITERATIONS) {
  const int rest = tiles % resident * chunks, sharers = std::clamp(rest / min_iterations, 1, resident);
  return {tiles < resident ? sharers : resident, sharers};
}

}  // namespace localllm::cuda
