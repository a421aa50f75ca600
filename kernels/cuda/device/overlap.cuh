// Programmatic dependent launch (sm_90 and later): a kernel starts before the previous kernel in the stream has ended.
//
// Before `wait_for_previous`, a kernel that was started by `launch_early` may read only memory that no kernel writes
// (weights); ChoiceArgs::early is an exception. Threads of every block call `wait_for_previous`; after it, the results of
// all earlier kernels are visible.
// `launch_dependents` permits the start of the next kernel. On older GPUs both functions do nothing.
#pragma once

#include "gpu.h"
#include "vec.cuh"

namespace localllm::cuda {

static __device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static __device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// `cluster`: blocks of a cluster; Hopper and later if it is more than 1.
template <class... Parameters, class... Arguments>
static inline void launch_clusters(void (*kernel)(Parameters...), int cluster, dim3 blocks, int threads, size_t shared,
                                   cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = gpu().major < 9 ? 0 : cluster > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <class... Parameters, class... Arguments>
static inline void launch_early(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared,
                                cudaStream_t stream, const Arguments&... arguments) {
  launch_clusters(kernel, 1, blocks, threads, shared, stream, arguments...);
}

}  // namespace localllm::cuda
