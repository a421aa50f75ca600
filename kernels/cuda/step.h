// All layers of a decode step of one row, in one kernel that stays on the GPU for all of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../cpu/kernels.h"

namespace localllm::cuda {

constexpr int MOST_BLOCKS = 1024;  // of any GPU: one on each multiprocessor
constexpr int STEP_SPLITS = 32;    // parts of a context, at most

// What a layer is made of, as addresses on the device; 0: there is none. Weights and norms are bf16, biases float32.
struct StepLayer {
  uint64_t weights[4];  // qkv [(heads + 2 kv_heads) * dim, hidden], out [hidden, heads * dim],
                        // gate_up [2 * inner, hidden], down [hidden, inner]
  uint64_t biases[4];
  uint64_t norms[2];       // before attention and before the MLP [hidden]
  uint64_t head_norms[2];  // of queries and of keys [dim]
};

// Everything is bf16 where nothing else is said.
struct StepArgs {
  const StepLayer* layers;      // [layer_count]
  void *x_out, *stream_out;     // [hidden]
  const void *x, *stream;       // [hidden]
  const float *cos, *sin;       // [dim / 2]
  const int64_t* slot;          // where the token's keys and values go
  const int32_t* context;       // positions, the token's own included
  const int32_t* page_table;    // [pages]
  void *keys, *values;          // [layers, slots, kv_heads, dim], `layer_stride`, … elements apart
  void* shared;                 // step_shared(…) bytes, zeros before the first call, and left alone between calls
  int64_t limit, layer_stride, slot_stride, head_stride;  // slots from limit on are left out
  int layer_count, hidden, inner, heads, kv_heads, dim, page_shift;
  Activation gate;
  float eps, offset, scale;
};

// Bytes that all steps of a model share.
int64_t step_shared(const StepArgs& args);

// Whether the current GPU has what this model needs.
bool step_fits(const StepArgs& args);

void step(const StepArgs& args, cudaStream_t stream);

}  // namespace localllm::cuda
