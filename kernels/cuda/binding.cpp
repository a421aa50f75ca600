// The ops on CUDA devices; what they are called and take is the CPU library's (../cpu/schema.cpp), loaded first. Checked
// here is what the host can see; indices lie on the device, and kernels leave out those beyond the cache.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../cpu/arguments.h"
#include "kernels.h"

// Declared in shim.h only where torch itself was built with CUDA, which the machine that compiles this need not have.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace localllm::cuda {
namespace {

using Optional = std::optional<Tensor>;

// Makes the tensors' device the current one, and holds torch's stream there.
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

// An argument on the same device as the first of its op.
Argument argument(const char* op, const char* name, const Tensor& tensor, const Tensor& first) {
  Argument found(op, name, tensor, Argument::Place::cuda);
  if (tensor.get_device() != first.get_device())
    refuse(op, ": ", name, " is on CUDA device ", (int)tensor.get_device(), ", ", (int)first.get_device(), " expected");
  return found;
}

// [rows, dim] or [rows, heads, dim]
NormArgs norm_args(const char* op, const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  Argument to = argument(op, "out", out, out), from = argument(op, "x", x, out);
  Argument scale = argument(op, "weight", weight, out);
  if (from.dims() == 3) from.shaped({ANY, ANY, ANY}), to.shaped({from.size(0), from.size(1), from.size(2)});
  else from.shaped({ANY, ANY}), to.shaped({from.size(0), from.size(1)});
  int64_t dim = from.size(from.dims() - 1);
  from.dense_rows(), to.written_rows(), scale.shaped({dim}).dense();
  if (to.number() != from.number()) refuse(op, ": out and x are of different types");
  NormArgs args{};
  args.out = to.data(), args.x = from.data(), args.weight = scale.data();
  args.type = from.number(), args.weight_type = scale.number();
  args.rows = from.size(0), args.heads = from.dims() == 3 ? from.size(1) : 1, args.dim = dim;
  args.x_stride = from.stride(), args.out_stride = to.stride(), args.eps = (float)eps;
  return args;
}

void rms_norm_op(Tensor out, Tensor x, Tensor weight, double eps, double offset) {
  NormArgs args = norm_args("rms_norm", out, x, weight, eps);
  args.offset = (float)offset;
  rms_norm(args, Queue(out));
}

void add_rms_norm_op(Tensor out, Tensor x, Tensor residual, Tensor weight, double eps, double offset) {
  NormArgs args = norm_args("add_rms_norm", out, x, weight, eps);
  Argument kept = argument("add_rms_norm", "residual", residual, out);
  if (kept.shaped({args.rows, args.dim}).dense().number() != args.type)
    refuse("add_rms_norm: residual and x are of different types");
  args.residual = kept.data(), args.offset = (float)offset;
  rms_norm(args, Queue(out));
}

void layer_norm_op(Tensor out, Tensor x, Tensor weight, Optional bias, double eps) {
  NormArgs args = norm_args("layer_norm", out, x, weight, eps);
  if (bias) {
    Argument shift = argument("layer_norm", "bias", *bias, out);
    if (shift.shaped({args.dim}).dense().number() != args.weight_type)
      refuse("layer_norm: bias and weight are of different types");
    args.bias = shift.data();
  }
  layer_norm(args, Queue(out));
}

void gate_op(Tensor out, Tensor x, int64_t kind) {
  Argument to = argument("gate", "out", out, out), from = argument("gate", "x", x, out);
  to.shaped({ANY, ANY}).written_rows();
  from.shaped({to.size(0), 2 * to.size(1)}).dense_rows();
  if (to.number() != from.number()) refuse("gate: out and x are of different types");
  if (kind < 0 || kind > 2) refuse("gate: kind is ", kind, ", 0 to 2 expected");
  gate({to.data(), from.data(), from.number(), (Activation)kind, to.size(0), to.size(1), from.stride(), to.stride()},
       Queue(out));
}

void rope_op(Tensor x, Tensor cos, Tensor sin, int64_t rotation) {
  Argument turned = argument("rope", "x", x, x);
  Argument cosines = argument("rope", "cos", cos, x), sines = argument("rope", "sin", sin, x);
  turned.shaped({ANY, ANY, ANY}).written_rows();
  cosines.shaped({turned.size(0), ANY}).of(ScalarType::Float).dense();
  sines.shaped({turned.size(0), cosines.size(1)}).of(ScalarType::Float).dense();
  if (2 * cosines.size(1) > turned.size(2))
    refuse("rope: cos turns ", 2 * cosines.size(1), " dimensions, x has ", turned.size(2));
  if (rotation < 0 || rotation > 1) refuse("rope: rotation is ", rotation, ", 0 or 1 expected");
  rope({turned.data(), turned.number(), cosines.data<float>(), sines.data<float>(), (Rotation)rotation, turned.size(0),
        turned.size(1), turned.size(2), cosines.size(1), turned.stride()},
       Queue(x));
}

void store_op(Tensor key, Tensor value, Tensor key_pages, Tensor value_pages, Tensor slots) {
  Argument k = argument("store", "key", key, key), v = argument("store", "value", value, key);
  Argument keys = argument("store", "key_pages", key_pages, key);
  Argument values = argument("store", "value_pages", value_pages, key), at = argument("store", "slots", slots, key);
  k.shaped({ANY, ANY, ANY}).dense_rows();
  v.shaped({k.size(0), k.size(1), k.size(2)}).dense_rows();
  if (k.number() != v.number()) refuse("store: key and value are of different types");
  keys.shaped({ANY, ANY, k.size(1), k.size(2)}).dense();
  values.shaped({keys.size(0), keys.size(1), keys.size(2), keys.size(3)}).dense();
  if (keys.number() != values.number()) refuse("store: key_pages and value_pages are of different types");
  at.shaped({k.size(0)}).of(ScalarType::Long).dense();
  store({k.data(), v.data(), keys.data(), values.data(), k.number(), keys.number(), at.data<int64_t>(), k.size(0),
         k.size(1) * k.size(2), k.stride(), v.stride(), keys.size(0) * keys.size(1)},
        Queue(key));
}

void copy_pages_op(Tensor pages, Tensor sources, Tensor targets) {
  Argument all = argument("copy_pages", "pages", pages, pages);
  Argument from = argument("copy_pages", "sources", sources, pages);
  Argument to = argument("copy_pages", "targets", targets, pages);
  if (all.dims() == 0) refuse("copy_pages: pages is a single number");
  all.dense(), from.shaped({ANY}).of(ScalarType::Long).dense();
  to.shaped({from.size(0)}).of(ScalarType::Long).dense();
  if (from.size(0) == 0 || all.size(0) == 0) return;
  int64_t page_bytes = all.count() / all.size(0) * all.bytes();
  Tensor between = torch::stable::new_empty(pages, {from.size(0) * page_bytes}, ScalarType::Byte);
  copy_pages({all.data(), from.data<int64_t>(), to.data<int64_t>(), from.size(0), page_bytes, between.data_ptr(),
              all.size(0)},
             Queue(pages));
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
