// A ring of shared memory that one warp fills by bulk copies and other warps empty, stage by stage.
//
// Racecheck follows a barrier from the thread that arrives to the one that waits, and no further: not to what a warp's
// other threads did before __syncwarp, and not to copies that count their bytes. Compiled with LOCALLLM_RACECHECK, every
// thread of a warp arrives, and copies are its own loads and stores: stages change hands as before, and can be judged.
#pragma once

#include "hopper.cuh"

namespace localllm::cuda::hopper {

#ifdef LOCALLLM_RACECHECK
constexpr int ARRIVALS = 32;  // of a warp at a barrier

__device__ inline void expect_copies(uint64_t&, int) {}
__device__ inline void copy(char* to, const void* from, int bytes, uint64_t&, uint64_t) {
  for (int at = 0; at < bytes; at += 16)
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(static_cast<const char*>(from) + at);
}
__device__ inline void hand_over(uint64_t& full) { arrive(full); }
__device__ inline void give_back(uint64_t& empty) { arrive(empty); }
#else
constexpr int ARRIVALS = 1;

// By a whole warp, as all of these: how many bytes will be copied to a stage, ...
__device__ inline void expect_copies(uint64_t& full, int bytes) {
  if (threadIdx.x % 32 == 0) arrive_expecting(full, bytes);
  __syncwarp();
}
// ... some of its threads' copies, of multiples of 16 bytes, ...
__device__ inline void copy(char* to, const void* from, int bytes, uint64_t& full, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          address(to)),
      "l"(from), "r"(bytes), "r"(address(&full)), "l"(policy)
      : "memory");
}
// ... after which the stage is full as soon as they are done.
__device__ inline void hand_over(uint64_t&) {}
// What a warp has read may be written anew.
__device__ inline void give_back(uint64_t& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(empty);
}
#endif

// Weights are read once a step: they need not stay in the cache.
__device__ inline uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace localllm::cuda::hopper
