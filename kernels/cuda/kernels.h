// The CUDA kernels. Arguments are those of the CPU kernels (../cpu/kernels.h) with device pointers, and a stream.
// Calls are asynchronous. A failed launch raises std::runtime_error.
#pragma once

#include <cuda_runtime.h>

#include "../cpu/kernels.h"

namespace localllm::cuda {

// Copies page sources[i] to page targets[i] in each cache. All sources are read before a target is written.
struct CopyCachePagesArgs {
  void* pages;  // [caches, limit] pages of page_bytes bytes each
  const int64_t *sources, *targets;
  int64_t caches, copies, page_bytes;
  void* shared;   // scratch memory, bytes() bytes
  int64_t limit;  // pages per cache

  int64_t bytes() const { return caches * copies * page_bytes; }
};

void rms_norm(const NormArgs& args, cudaStream_t stream);
void gate(const ActivationArgs& args, cudaStream_t stream);
void rope(const RopeArgs& args, cudaStream_t stream);
void store(const StoreArgs& args, cudaStream_t stream);
void copy_cache_pages(const CopyCachePagesArgs& args, cudaStream_t stream);
void append(const AppendArgs& args, cudaStream_t stream);  // the cache has the type of qkv, or e4m3
void embedding(const EmbeddingArgs& args, cudaStream_t stream);

}  // namespace localllm::cuda
