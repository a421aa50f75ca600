// The barriers and copies of a ring buffer in shared memory: a producer warp fills stages by bulk copies, consumer
// warps read them.
//
// compute-sanitizer's racecheck knows that a barrier orders the arriving thread before the waiting thread. It does not
// know __syncwarp before the arrival, nor bulk copies that complete a transaction barrier. With LOCALLLM_RACECHECK
// therefore every thread of a warp arrives, and plain loads and stores replace the bulk copies.
#pragma once

#include "hopper.cuh"

namespace localllm::cuda::hopper {

#ifdef LOCALLLM_RACECHECK
constexpr int ARRIVALS = 32;  // arrivals per warp at a barrier

__device__ inline void expect_bytes(uint64_t&, int) {}
__device__ inline void copy(char* to, const void* from, int bytes, uint64_t&, uint64_t) {
  for (int offset = 0; offset < bytes; offset += 16)
    *reinterpret_cast<uint4*>(to + offset) = *reinterpret_cast<const uint4*>(static_cast<const char*>(from) + offset);
}
__device__ inline void commit_stage(uint64_t& full) { arrive(full); }
__device__ inline void release_stage(uint64_t& empty) { arrive(empty); }
#else
constexpr int ARRIVALS = 1;

// Announces the number of bytes that the copies of the producer warp write to a stage. All threads of the producer warp
// call it.
__device__ inline void expect_bytes(uint64_t& full, int bytes) {
  if (threadIdx.x % 32 == 0) arrive_expecting(full, bytes);
  __syncwarp();
}
// Starts a bulk copy into the announced stage. One thread calls it. `bytes` is a multiple of 16.
__device__ inline void copy(char* to, const void* from, int bytes, uint64_t& full, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          address(to)),
      "l"(from), "r"(bytes), "r"(address(&full)), "l"(policy)
      : "memory");
}
// The producer warp calls it after it has started all copies of a stage. There is nothing to do: the transaction
// barrier completes when the bytes arrive.
__device__ inline void commit_stage(uint64_t&) {}
// A consumer warp calls it when it has read a stage. The producer may then overwrite the stage.
__device__ inline void release_stage(uint64_t& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(empty);
}
#endif

// The L2 policy of data that a step reads once (weights): evict first.
__device__ inline uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace localllm::cuda::hopper
