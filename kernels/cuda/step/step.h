// All layers of a decode step of one row, in one persistent kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../cpu/kernels.h"

namespace localllm::cuda {

constexpr int MAX_BLOCKS = 1024;     // limit of thread blocks; one per multiprocessor
constexpr int MAX_STEP_CHUNKS = 32;  // limit of the chunks of a context

// Device addresses of the weights of a layer; 0: absent. Weights and norms are bf16, biases float32.
struct StepLayer {
  uint64_t weights[4];  // qkv [(heads + 2 kv_heads) * dim, hidden], out [hidden, heads * dim],
                        // gate_up [2 * inner, hidden], down [hidden, inner]
  uint64_t biases[4];
  uint64_t norms[2];       // norms before attention and before the MLP [hidden]
  uint64_t head_norms[2];  // norms of query heads and of key heads [dim]
};

// A tensor whose pointer has type void* is bf16.
struct StepArgs {
  const StepLayer* layers;      // [layer_count]
  void *x_out, *stream_out;     // [hidden]
  const void *x, *stream;       // [hidden]
  const float *cos, *sin;       // [dim / 2]
  const int64_t* slot;          // [1], cache slot of the token's key and value
  const int32_t* context;       // [1], context length, including the token
  const int32_t* page_table;    // [pages]
  void *keys, *values;          // [layers, slots, kv_heads, dim]; strides below, in elements
  void* shared;                 // step_shared(…) bytes: zeros before the first call, unchanged between calls
  int64_t limit, layer_stride, slot_stride, head_stride;  // a token with slot >= limit is not stored
  int layer_count, hidden, inner, heads, kv_heads, dim, page_shift;
  Activation gate;
  float eps, offset, scale;
};

// Bytes of StepArgs::shared. Steps of one model on one stream share this memory.
int64_t step_shared(const StepArgs& args);

// True if the current GPU supports a model of this shape.
bool step_fits(const StepArgs& args);

void step(const StepArgs& args, cudaStream_t stream);

}  // namespace localllm::cuda
