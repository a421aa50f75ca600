// Memory for workers: aligned, kept, and in large pages when there is much of it.
#pragma once

#include <cstddef>

namespace localllm {

// Asks for large pages under [start, start + bytes), as far as whole ones fit. Before the memory is first touched.
void advise_huge(void* start, size_t bytes);

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
