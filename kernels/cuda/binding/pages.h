// Checks of the cache pages and of pointers that the attention kernels read with 16-byte loads.
#pragma once

#include "../../cpu/binding/arguments.h"
#include "../../cpu/binding/checks.h"
#include "../attention/decode.h"

namespace localllm::cuda {

// Returns the stride between positions in elements. Raises if pages are not contiguous, or if positions or heads do not
// start at multiples of 16 bytes.
inline int64_t slot_stride(const char* op, const Tensor& pages, const char* name) {
  int64_t slot = pages.stride(1);
  if (pages.stride(3) != 1 || pages.stride(0) != slot * pages.size(1) || slot % 8 || pages.stride(2) % 8)
    refuse(op, ": ", name, " are not contiguous, or their heads are not aligned to 16 bytes");
  return slot;
}

// Raises unless the queries have a dtype and a head size that the kernels with mma.sync support.
inline void refuse_heads(const char* op, Argument& query) {
  if (query.number() == Type::f32 || !supports_dim(query.size(2)))
    refuse(op, ": 16-bit heads of 64, 80, 96, 128, 192 or 256 expected");
}

inline void refuse_unaligned(const char* op, const Tensor& tensor, const char* name) {
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16) refuse(op, ": ", name, " is not aligned to 16 bytes");
}

}  // namespace localllm::cuda
