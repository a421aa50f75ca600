// Numbers that a kernel counts in and leaves as zeros. Each stream has its own, so two streams may run the same kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace localllm::cuda {

constexpr int MOST_PAIRS = 1 << 16;  // rows times kv heads of a decode step: how many of them have parts to count
constexpr int CLAIMS = 2;            // of prompt attention: tiles that are claimed, blocks that have finished

struct Counters {
  int32_t* arrivals;  // [MOST_PAIRS]
  int32_t* claims;    // [CLAIMS]
};

// Of a stream of the current device, allocated at its first call, within a capture as well. Raises std::runtime_error
// where the memory does not suffice.
Counters counters_of(cudaStream_t stream);

}  // namespace localllm::cuda
