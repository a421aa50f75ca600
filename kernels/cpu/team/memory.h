// Memory of workers: aligned, reused, and on huge pages if it is large.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker.h"

namespace localllm {

// Advises the operating system to back [start, start + bytes) with huge pages. Call it before the first access to the
// memory.
void advise_huge(void* start, size_t bytes);

// Fresh memory, divided into units of equal size such as the panels of a weight. Each worker touches the units of its
// share first, so that the system allocates their pages near the core that reads them later.
struct TouchArgs {
  char* start;
  int64_t bytes, unit;
};
void first_touch(const TouchArgs& args, const Worker& worker);

// A buffer that grows and never shrinks. Growth discards its contents. 64-byte aligned.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  // At least `bytes` of uninitialised memory. Throws std::bad_alloc.
  void* reserve(size_t bytes);

 private:
  void* start_ = nullptr;
  size_t size_ = 0;
};

}  // namespace localllm
