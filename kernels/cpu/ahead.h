// What a loop over weights asks memory for while it computes.
#pragma once

#include <cstdint>

namespace localllm::LANE {

// Memory that will be wanted soon: at `at`, and `by` further on with every step. Where several tiles pass over a block
// of weights, each pass asks for its part of the next block, so that memory is never waited for or left idle.
struct Ahead {
  const char* at;
  int64_t by;
};

}  // namespace localllm::LANE
