// torch's current CUDA stream, for the ops in this folder.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../../cpu/binding/arguments.h"
#include "../kernels.h"

// shim.h declares this function only if torch was built with CUDA. The build machine may have a torch without CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace localllm::cuda {

using Optional = std::optional<Tensor>;

// Makes the tensor's device the current device while it lives, and converts to torch's current stream of that device.
class Stream {
 public:
  explicit Stream(const Tensor& on) : guard_(on.get_device()) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(on.get_device(), &stream) != 0)
      throw std::runtime_error("torch returned no current CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }
  operator cudaStream_t() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace localllm::cuda
