// Software prefetch of weights.
#pragma once

#include <cstdint>

namespace localllm::VARIANT {

// The address that a loop prefetches next; the loop adds `by` bytes in each step. If several tiles use the same block
// of weights, the loop of each tile prefetches a part of the next block, so that memory is read at a constant rate.
struct Prefetch {
  const char* at;
  int64_t by;
};

}  // namespace localllm::VARIANT
