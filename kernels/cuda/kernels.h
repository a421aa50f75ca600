// Every CUDA kernel: the same arguments as the CPU's (../cpu/kernels.h), pointers to device memory, and a stream.
// A call only starts the work; errors of the launch itself are thrown as std::runtime_error.
#pragma once

#include <cuda_runtime.h>

#include "../cpu/kernels.h"

namespace localllm::cuda {

struct CopyPartsArgs {  // of every part alike; all sources are read before any target is written
  void* pages;          // [parts, limit] of page_bytes each
  const int64_t *sources, *targets;
  int64_t parts, copies, page_bytes;
  void* shared;  // bytes()
  int64_t limit;

  int64_t bytes() const { return parts * copies * page_bytes; }
};

void rms_norm(const NormArgs& args, cudaStream_t stream);
void layer_norm(const NormArgs& args, cudaStream_t stream);
void gate(const ActivationArgs& args, cudaStream_t stream);
void rope(const RopeArgs& args, cudaStream_t stream);
void store(const StoreArgs& args, cudaStream_t stream);
void copy_parts(const CopyPartsArgs& args, cudaStream_t stream);
void append(const AppendArgs& args, cudaStream_t stream);  // pages of qkv's type, or e4m3
void embedding(const EmbeddingArgs& args, cudaStream_t stream);

}  // namespace localllm::cuda
