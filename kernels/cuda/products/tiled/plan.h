// The choice of tiles and thread blocks of the tiled kernel (kernel.cuh). Plain C++, so that tests need no GPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace localllm::cuda {

constexpr int TILED_SHARED = 98 << 10;  // bytes: limit of a block's shared memory, for GPUs with 99 KB per block
constexpr int MAX_TILED_SLOTS = 4;      // slots of the ring buffer
constexpr int MIN_ITERATIONS = 4;       // iterations (chunks of 128 inputs) of a thread block that are worth its start
constexpr int HOPPER_SHARED = 220 << 10;  // bytes of shared memory per block that the kernels of Hopper need

constexpr int MAX_SPLIT = 2;  // thread blocks of a cluster that share a tile; not all clusters of 4 run at the same time

// The thread blocks of a product, and how many of them share the tiles of the last, incomplete wave. split > 1: each
// tile has a cluster of `split` blocks.
struct TiledBlocks {
  int blocks, sharers, split;
};

// The fastest plan. `resident`: blocks that the GPU runs at the same time. `sum_cost`: the time to add the parts of a tile
// through global memory, in iterations; a cluster needs a quarter of it. `clusters`: the kernel runs in clusters.
inline TiledBlocks blocks_of_product(int tiles, int chunks, int resident, int sum_cost = 0, bool clusters = false) {
  const int64_t waves = tiles / resident, rest = int64_t(tiles % resident) * chunks;
  const int sharers = int(std::clamp<int64_t>(rest / MIN_ITERATIONS, 1, resident));
  TiledBlocks best{waves ? resident : sharers, sharers, 1};
  int64_t min_iterations = waves * chunks + (rest + sharers - 1) / sharers + (rest ? sum_cost : 0);
  const auto consider = [&](TiledBlocks plan, int64_t iterations) {
    if (iterations >= min_iterations) return;
    best = plan;
    min_iterations = iterations;
  };
  const int alone = std::max(1, tiles % resident);
  consider({waves ? resident : alone, alone, 1}, (waves + (rest > 0)) * chunks);
  if (clusters && int64_t(tiles) * MAX_SPLIT <= resident && chunks >= MAX_SPLIT * MIN_ITERATIONS)
    consider({tiles * MAX_SPLIT, tiles * MAX_SPLIT, MAX_SPLIT}, (chunks + MAX_SPLIT - 1) / MAX_SPLIT + sum_cost / 4);
  return best;
}

}  // namespace localllm::cuda
