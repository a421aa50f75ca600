// Tensor maps: the descriptors of TMA copies (Hopper).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace localllm::cuda {

// Dimensions are in order of memory, the fastest first. `strides`: bytes, from the second dimension on. `op`: the op in
// error messages. The default swizzle is that of the tiles in hopper.cuh.
template <int DIMS>
CUtensorMap tensor_map(const char* op, CUtensorMapDataType type, const void* from, const cuuint64_t (&lengths)[DIMS],
                       const cuuint64_t (&strides)[DIMS - 1], const cuuint32_t (&box)[DIMS],
                       CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  if (!encode) throw std::runtime_error(std::string(op) + ": the CUDA driver is older than 12.0");
  CUtensorMap map;
  cuuint32_t steps[DIMS];
  std::fill(steps, steps + DIMS, 1);
  CUresult result = encode(&map, type, DIMS, const_cast<void*>(from), lengths, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error(std::string(op) + ": cuTensorMapEncodeTiled failed with error " + std::to_string(result));
  return map;
}

}  // namespace localllm::cuda
