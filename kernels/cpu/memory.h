// Memory for workers: aligned, kept, and in large pages when there is much of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker.h"

namespace localllm {

// Asks for large pages under [start, start + bytes), as far as whole ones fit. Before the memory is first touched.
void advise_huge(void* start, size_t bytes);

// Memory that is made of units of equal size, such as a weight's panels, not touched so far: each worker touches those
// that are its share, so that they lie near the core that will read them.
struct TouchArgs {
  char* start;
  int64_t bytes, unit;
};
void first_touch(const TouchArgs& args, const Worker& worker);

// A block that grows and never shrinks; growing forgets what was in it. 64-byte aligned.
class Block {
 public:
  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  // At least `bytes`, contents undefined. Throws std::bad_alloc.
  void* at_least(size_t bytes);

 private:
  void* start_ = nullptr;
  size_t size_ = 0;
};

}  // namespace localllm
