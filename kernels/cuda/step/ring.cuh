// The ring buffer of weights of a step. In every block, a producer warp copies the block's tiles of all products of all
// layers in order. It runs ahead of the consumer warps by up to the length of the ring, also while they wait for words.
#pragma once

#include "../device/overlap.cuh"
#include "../device/ring.cuh"
#include "plan.cuh"

namespace localllm::cuda {
namespace {

extern __shared__ __align__(128) char memory[];  // layout: see Plan

struct Block {  // state that the threads of a block share
  const Plan& plan;
  const StepArgs& a;

  __device__ explicit Block(const Plan& plan) : plan(plan), a(plan.args) {}
  template <class T>
  __device__ T* pointer(int offset) const {
    return reinterpret_cast<T*>(memory + offset);
  }
  __device__ const StepLayer& layer(int index) const { return pointer<StepLayer>(plan.layers)[index]; }
  __device__ uint64_t* words(int64_t offset) const { return static_cast<uint64_t*>(a.shared) + offset; }
  // The copy of the words that this block reads.
  __device__ const uint64_t* nearest_words(const Exchange& from) const {
    return words(from.offset) + int(blockIdx.x % COPIES) * from.pairs;
  }
  __device__ uint64_t& full(int slot) const { return pointer<uint64_t>(0)[slot]; }
  __device__ uint64_t& empty(int slot) const { return pointer<uint64_t>(0)[MAX_STAGES + slot]; }
  __device__ uint64_t& cache_full() const { return pointer<uint64_t>(0)[2 * MAX_STAGES]; }
  __device__ uint64_t& cache_empty() const { return pointer<uint64_t>(0)[2 * MAX_STAGES + 1]; }
};

// The round-robin assignment of tiles to blocks. It continues from product to product, so the blocks that have one tile
// fewer in one product are the first to get tiles in the next.
class Order {
 public:
  __device__ int first() const {
    int index = int(blockIdx.x) - before_;
    return index < 0 ? index + int(gridDim.x) : index;
  }
  __device__ void pass(const Product& product) {
    before_ += product.remainder;
    if (before_ >= int(gridDim.x)) before_ -= gridDim.x;
  }

 private:
  int before_ = 0;  // tiles of the previous products, modulo blocks
};

struct Ring {
  int index = 0;  // number of stages before the current stage
  __device__ int slot(const Block& b) const { return index & (b.plan.stages - 1); }
  __device__ int parity(const Block& b) const { return index & b.plan.stages ? 1 : 0; }
};

// The loop of the producer warp of weights.
__device__ inline void fetch_weights(const Block& b) {
  const uint64_t policy = hopper::evict_first();
  const int lane = threadIdx.x % 32;
  char* to = memory + b.plan.ring + lane * PITCH;
  Ring ring;
  Order order;
#pragma unroll 1
  for (int index = 0; index < 4 * b.a.layer_count; index++) {
    const int phase = index % 4;
    const Product& p = b.plan.products[phase];
    const char* weight = reinterpret_cast<const char*>(b.layer(index / 4).weights[phase]);
#pragma unroll 1
    for (int tile = order.first(); tile < p.tiles; tile += gridDim.x) {
      int output = phase == GATE_UP ? lane / 4 * b.a.inner + tile * 4 + lane % 4 : tile * 8 + lane;
      const char* from = weight + int64_t(output) * p.in_features * 2;
#pragma unroll 1
      for (int k = 0; k < p.in_features; k += COLUMNS) {
        int bytes = min(COLUMNS, p.in_features - k) * 2;
        const int slot = ring.slot(b);
        hopper::wait_barrier(b.empty(slot), ring.parity(b) ^ 1);
        if (ring.index >= b.plan.in_flight) {
          const Ring before{ring.index - b.plan.in_flight};
          hopper::wait_barrier(b.full(before.slot(b)), before.parity(b));
        }
        uint64_t& full = b.full(slot);
        hopper::expect_bytes(full, 8 * bytes);
        if (lane < 8) hopper::copy(to + slot * STAGE, from + k * 2, bytes, full, policy);
        hopper::commit_stage(full);
        ring.index++;
      }
    }
    order.pass(p);
  }
}

}  // namespace
}  // namespace localllm::cuda
