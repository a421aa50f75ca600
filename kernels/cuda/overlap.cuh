// Programmatic dependent launch (sm_90 and later): a kernel starts before the previous kernel in the stream has ended.
//
// Before `await_previous`, a kernel that was started by `launch_early` may read only memory that no kernel writes
// (weights). Threads of every block call `await_previous`; after it, the results of all earlier kernels are visible.
// `let_next_begin` permits the start of the next kernel. On older GPUs both functions do nothing.
#pragma once

#include "vec.cuh"

namespace localllm::cuda {

static __device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static __device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct Gpu {
  int major, minor, processors, shared_limit;  // shared_limit: bytes of shared memory per block (opt-in limit)
};

// The properties of the current device, cached.
static inline const Gpu& gpu() {
  static Gpu known[64];
  int device = 0;
  cudaGetDevice(&device);
  Gpu& found = known[device % 64];
  if (!found.processors) {
    cudaDeviceGetAttribute(&found.major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&found.minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&found.shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
#ifdef LOCALLLM_SHARED
    if (found.shared_limit > LOCALLLM_SHARED) found.shared_limit = LOCALLLM_SHARED;
#endif
    cudaDeviceGetAttribute(&found.processors, cudaDevAttrMultiProcessorCount, device);
  }
  return found;
}

template <class... Parameters, class... Arguments>
static inline void launch_early(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared,
                                cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared, config.stream = stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early, config.numAttrs = gpu().major >= 9 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace localllm::cuda
