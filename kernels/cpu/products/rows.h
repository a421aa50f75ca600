// The rows of the activations of a product.
#pragma once

#include "../kernels.h"

namespace localllm::VARIANT {

template <class T>
static inline const T* row_of(const LinearArgs& args, int64_t row) {
  return (const T*)args.x + (args.row_ids ? args.row_ids[row] : row) * args.x_stride;
}

}  // namespace localllm::VARIANT
