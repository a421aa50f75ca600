// What every op on CUDA devices needs of torch: its stream.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../cpu/arguments.h"
#include "kernels.h"

// Declared in shim.h only where torch itself was built with CUDA, which the machine that compiles this need not have.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace localllm::cuda {

using Optional = std::optional<Tensor>;

// Makes the tensors' device the current one, and holds torch's stream there. Arguments are checked before.
class Queue {
 public:
  explicit Queue(const Tensor& on) : guard_(on.get_device()) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(on.get_device(), &stream) != 0)
      throw std::runtime_error("torch names no CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }
  operator cudaStream_t() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace localllm::cuda
