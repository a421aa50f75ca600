// The properties of the current GPU that the choice of kernels and their launch sizes depend on.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <climits>

namespace localllm::cuda {

struct Gpu {
  int major, minor, processors, shared_limit;  // shared_limit: bytes of shared memory per block (opt-in limit)
};

struct GpuTable {
  Gpu limits{INT_MAX, 0, INT_MAX, INT_MAX};  // upper limits that a developer sets (limit_gpu), to imitate a smaller GPU
  Gpu devices[64]{};                         // processors == 0: not queried yet
};

// One table for the library: an inline variable is the same in all files.
inline GpuTable gpu_table;

inline Gpu query_gpu(int device) {
  const Gpu& limits = gpu_table.limits;
  Gpu gpu{};
  cudaDeviceGetAttribute(&gpu.major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&gpu.minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDeviceGetAttribute(&gpu.shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&gpu.processors, cudaDevAttrMultiProcessorCount, device);
  if (limits.major * 100LL + limits.minor < gpu.major * 100LL + gpu.minor) {
    gpu.major = limits.major;
    gpu.minor = limits.minor;
  }
  gpu.shared_limit = std::min(gpu.shared_limit, limits.shared_limit);
  gpu.processors = std::min(gpu.processors, limits.processors);
  return gpu;
}

// The properties of the current device, cached.
inline const Gpu& gpu() {
  int device = 0;
  cudaGetDevice(&device);
  Gpu& cached = gpu_table.devices[device % 64];
  if (!cached.processors) cached = query_gpu(device);
  return cached;
}

}  // namespace localllm::cuda
