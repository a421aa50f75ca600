// What is asked of the cache's pages, and of all that is read 16 bytes at a time, before attention's kernels see them.
#pragma once

#include "../cpu/checks.h"

namespace localllm::cuda {

// Positions lie evenly, page after page, and their heads on whole 16 bytes. -> elements from one to the next
inline int64_t slot_stride(const char* op, const Tensor& pages, const char* name) {
  int64_t slot = pages.stride(1);
  if (pages.stride(3) != 1 || pages.stride(0) != slot * pages.size(1) || slot % 8 || pages.stride(2) % 8)
    refuse(op, ": ", name, " do not lie page after page");
  return slot;
}

inline void refuse_unaligned(const char* op, const Tensor& tensor, const char* name) {
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16) refuse(op, ": ", name, " does not begin at 16 bytes");
}

}  // namespace localllm::cuda
