// The ops on CUDA devices; what they are called and take is the CPU library's (../cpu/schema.cpp), loaded first. Checked
// here is what the host can see; indices lie on the device, and kernels leave out those beyond the cache.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../cpu/element_arguments.h"
#include "kernels.h"

// Declared in shim.h only where torch itself was built with CUDA, which the machine that compiles this need not have.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace localllm::cuda {
namespace {

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

void rms_norm_op(Tensor out, Tensor x, Tensor weight, double eps, double offset) {
  NormArgs args = norm_arguments({"rms_norm", out}, out, x, weight, eps, offset, nullptr, nullptr);
  rms_norm(args, Queue(out));
}

void add_rms_norm_op(Tensor out, Tensor x, Tensor residual, Tensor weight, double eps, double offset) {
  NormArgs args = norm_arguments({"add_rms_norm", out}, out, x, weight, eps, offset, &residual, nullptr);
  rms_norm(args, Queue(out));
}

void layer_norm_op(Tensor out, Tensor x, Tensor weight, Optional bias, double eps) {
  NormArgs args = norm_arguments({"layer_norm", out}, out, x, weight, eps, 0.0, nullptr, bias ? &*bias : nullptr);
  layer_norm(args, Queue(out));
}

void gate_op(Tensor out, Tensor x, int64_t kind) {
  ActivationArgs args = gate_arguments({"gate", out}, out, x, kind);
  gate(args, Queue(out));
}

void rope_op(Tensor x, Tensor cos, Tensor sin, int64_t rotation) {
  RopeArgs args = rope_arguments({"rope", x}, x, cos, sin, rotation);
  rope(args, Queue(x));
}

void store_op(Tensor key, Tensor value, Tensor key_pages, Tensor value_pages, Tensor slots) {
  StoreArgs args = store_arguments({"store", key}, key, value, key_pages, value_pages, slots);
  store(args, Queue(key));
}

void copy_pages_op(Tensor pages, Tensor sources, Tensor targets) {
  CopyPagesArgs args = copy_pages_arguments({"copy_pages", pages}, pages, sources, targets);
  if (args.copies * args.page_bytes == 0) return;
  Tensor between = torch::stable::new_empty(pages, {args.copies * args.page_bytes}, ScalarType::Byte);
  args.shared = between.data_ptr();
  copy_pages(args, Queue(pages));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm_op));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm_op));
  library.impl("layer_norm", TORCH_BOX(&layer_norm_op));
  library.impl("gate", TORCH_BOX(&gate_op));
  library.impl("rope", TORCH_BOX(&rope_op));
  library.impl("store", TORCH_BOX(&store_op));
  library.impl("copy_pages", TORCH_BOX(&copy_pages_op));
}

}  // namespace localllm::cuda
