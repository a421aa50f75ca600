// The weights of a step on their way: one warp of every block fetches its tiles of all products of all layers into a ring
// of shared memory, in order, as far ahead as the ring is long, whatever the other warps wait for.
#pragma once

#include "hopper.cuh"
#include "overlap.cuh"
#include "step_plan.cuh"

namespace localllm::cuda {
namespace {

struct Block {  // what all threads know
  const StepArgs& a;
  const Room& room;
  const Places& places;
  char* memory;

  __device__ Block(const Plan& plan, char* memory)
      : a(plan.args), room(plan.room), places(plan.places), memory(memory) {}
  template <class T>
  __device__ T* at(int place) const {
    return reinterpret_cast<T*>(memory + place);
  }
  __device__ const StepLayer& layer(int index) const { return at<StepLayer>(room.layers)[index]; }
  __device__ uint64_t* words(int64_t place) const { return static_cast<uint64_t*>(a.shared) + place; }
  __device__ uint64_t& full(int slot) const { return at<uint64_t>(0)[slot]; }
  __device__ uint64_t& empty(int slot) const { return at<uint64_t>(0)[MOST_STAGES + slot]; }
};

// Tiles of all products, one after the other, are dealt out to blocks in turn: what one product leaves uneven, the next
// evens out.
class Order {
 public:
  __device__ int first() const {
    int own = int(blockIdx.x) - before_;
    return own < 0 ? own + int(gridDim.x) : own;
  }
  __device__ void pass(int tiles) { before_ = (before_ + tiles) % int(gridDim.x); }

 private:
  int before_ = 0;  // tiles, modulo blocks
};

struct Ring {
  int stages, slot = 0, parity = 0;
  __device__ void next() {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

__device__ inline void copy_bulk(uint32_t to, const char* from, int bytes, uint64_t& barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(hopper::address(&barrier)), "l"(policy)
      : "memory");
}

// By one warp.
__device__ inline void fetch_weights(const Block& b) {
  uint64_t policy;  // weights are read once a step: they need not stay in the cache
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const int lane = threadIdx.x % 32;
  const uint32_t to = hopper::address(b.memory + b.room.ring) + lane * PITCH;
  Ring ring{b.room.stages};
  Order order;
  for (int layer = 0; layer < b.a.layer_count; layer++)
    for (int phase = QKV; phase <= DOWN; phase++) {
      const Product p = product_of(b.a, phase);
      const char* weight = reinterpret_cast<const char*>(b.layer(layer).weights[phase]);
      for (int tile = order.first(); tile < p.tiles; tile += gridDim.x) {
        int output = phase == GATE_UP ? lane / 4 * b.a.inner + tile * 4 + lane % 4 : tile * 8 + lane;
        const char* from = weight + int64_t(output) * p.ins * 2;
        for (int k = 0; k < p.ins; k += COLUMNS) {
          int bytes = min(COLUMNS, p.ins - k) * 2;
          hopper::await(b.empty(ring.slot), ring.parity ^ 1);
          if (lane == 0) hopper::arrive_expecting(b.full(ring.slot), 8 * bytes);
          __syncwarp();
          if (lane < 8) copy_bulk(to + ring.slot * STAGE, from + k * 2, bytes, b.full(ring.slot), policy);
          ring.next();
        }
      }
      order.pass(p.tiles);
    }
}

}  // namespace
}  // namespace localllm::cuda
