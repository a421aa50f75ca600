// Data exchange between thread blocks without grid barriers, as in NCCL's LL (low latency) protocol. A 64-bit word has
// 4 bytes of data and the number of the layer run that wrote them, its epoch. A reader polls the word until it has the
// expected epoch. A block writes a word once per layer, after it has read all words of the previous layer; so no block
// overwrites a word that another block still needs.
#pragma once

#include "../device/overlap.cuh"

namespace localllm::cuda {
namespace {

#ifndef STEP_MAX_READS
// Limit of reads of a word, some seconds; the kernel then traps, so that it does not hang.
#define STEP_MAX_READS (1u << 23)
#endif

struct Words {  // two adjacent words
  uint64_t first, second;
};

__device__ inline void publish(uint64_t* first, uint32_t bits, uint32_t epoch) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(first), "l"(uint64_t(epoch) << 32 | bits) : "memory");
}
__device__ inline void publish(uint64_t* first, float value, uint32_t epoch) {
  publish(first, __float_as_uint(value), epoch);
}

__device__ inline Words read_words(const uint64_t* first) {
  Words words;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words.first), "=l"(words.second)
               : "l"(first)
               : "memory");
  return words;
}

__device__ inline bool have_epoch(const Words& words, uint32_t epoch) {
  return uint32_t(words.first >> 32) == epoch && uint32_t(words.second >> 32) == epoch;
}

// Polls the two words at `first` until both have this epoch; returns their data. `words`: the result of the first read.
__device__ inline uint2 poll(Words words, const uint64_t* first, uint32_t epoch) {
  for (uint32_t reads = 0; !have_epoch(words, epoch); words = read_words(first))
    if (++reads > STEP_MAX_READS) __trap();
  return {uint32_t(words.first), uint32_t(words.second)};
}

__device__ inline uint2 poll(const uint64_t* first, uint32_t epoch) { return poll(read_words(first), first, epoch); }

}  // namespace
}  // namespace localllm::cuda
