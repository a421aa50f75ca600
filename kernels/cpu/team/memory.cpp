#include "memory.h"

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace localllm {
namespace {

constexpr size_t CACHE_LINE = 64;
constexpr size_t HUGE_PAGE = 2 << 20;
constexpr int64_t SMALL_PAGE = 4096;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

void advise_huge([[maybe_unused]] void* start, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  uintptr_t begin = round_up((uintptr_t)start, HUGE_PAGE);
  uintptr_t end = ((uintptr_t)start + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);  // only advice, so a failure is ignored
#endif
}

void first_touch(const TouchArgs& args, const Worker& worker) {
  Share share = share_of((args.bytes + args.unit - 1) / args.unit, worker);
  int64_t end = share.end * args.unit < args.bytes ? share.end * args.unit : args.bytes;
  for (int64_t offset = share.begin * args.unit; offset < end; offset += SMALL_PAGE) args.start[offset] = 0;
}

Buffer::~Buffer() { std::free(start_); }

void* Buffer::reserve(size_t bytes) {
  if (bytes <= size_ && start_) return start_;
  std::free(start_);
  start_ = nullptr;
  size_ = 0;
  // A quarter more than requested, so that sizes that grow row by row do not reallocate each time.
  size_t size = round_up(bytes + bytes / 4 + 1, bytes >= HUGE_PAGE ? HUGE_PAGE : 4096);
  start_ = std::aligned_alloc(size >= HUGE_PAGE ? HUGE_PAGE : CACHE_LINE, size);
  if (!start_) throw std::bad_alloc();
  size_ = size;
  advise_huge(start_, size_);
  return start_;
}

}  // namespace localllm
