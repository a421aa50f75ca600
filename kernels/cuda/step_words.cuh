// How blocks hand each other numbers without a barrier: every 64-bit word holds 4 bytes and the number of the turn that
// they belong to, and whoever needs them reads until that turn has come (NCCL's protocol for low latency). A word is
// written once a layer, by a block that has read everything of the layer before; so nothing is ever written too early.
#pragma once

#include "overlap.cuh"

namespace localllm::cuda {
namespace {

#ifndef STEP_PATIENCE
#define STEP_PATIENCE (1u << 23)  // reads of a word, seconds: then it is an error rather than a GPU that hangs
#endif

struct Words {  // two of them
  uint64_t one, other;
};

__device__ inline void publish(uint64_t* at, uint32_t bits, uint32_t turn) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(uint64_t(turn) << 32 | bits) : "memory");
}
__device__ inline void publish(uint64_t* at, float value, uint32_t turn) { publish(at, __float_as_uint(value), turn); }

__device__ inline Words words_at(const uint64_t* at) {
  Words words;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(words.one), "=l"(words.other) : "l"(at) : "memory");
  return words;
}

__device__ inline bool are_of(const Words& words, uint32_t turn) {
  return uint32_t(words.one >> 32) == turn && uint32_t(words.other >> 32) == turn;
}

// What was read at `at` until it is of this turn.
__device__ inline uint2 awaited(Words words, const uint64_t* at, uint32_t turn) {
  for (uint32_t reads = 0; !are_of(words, turn); words = words_at(at))
    if (++reads > STEP_PATIENCE) __trap();
  return {uint32_t(words.one), uint32_t(words.other)};
}

__device__ inline uint2 awaited(const uint64_t* at, uint32_t turn) { return awaited(words_at(at), at, turn); }

}  // namespace
}  // namespace localllm::cuda
