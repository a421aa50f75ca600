// Software prefetch of weights.
#pragma once

#include <cstdint>

namespace localllm::VARIANT {

// The address that a loop prefetches next; the loop adds `step_bytes` bytes in each step. If several tiles use the same
// block of weights, the loop of each tile prefetches some of the next block, so that memory is read at a constant rate.
struct Prefetch {
  const char* address;
  int64_t step_bytes;
};

}  // namespace localllm::VARIANT
