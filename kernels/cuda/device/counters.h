// Counters in device memory. They are zero between kernels. Each stream has separate counters, so two streams may run
// the same kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace localllm::cuda {

constexpr int MAX_PAIRS = 1 << 16;  // limit of rows * kv_heads in a decode step; each pair has a counter
constexpr int CLAIMS = 2;            // counters of prefill attention: claimed tiles, finished thread blocks

struct Counters {
  int32_t* arrivals;  // [MAX_PAIRS]
  int32_t* claims;    // [CLAIMS]
};

// The counters of a stream of the current device. The first call allocates them, also during a capture. Raises
// std::runtime_error if device memory runs out.
Counters counters_of(cudaStream_t stream);

}  // namespace localllm::cuda
