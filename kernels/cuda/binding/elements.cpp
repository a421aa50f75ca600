// The CUDA implementations of ops whose schemas the CPU library defines (cpu/binding/schema.cpp, loaded first). Checks
// shapes, dtypes and strides. Indices are device data and not checked; kernels skip indices outside the cache.
#include "../../cpu/binding/checks.h"
#include "../../cpu/binding/element_arguments.h"
#include "../device/gpu.h"
#include "stream.h"

namespace localllm::cuda {
namespace {

void rms_norm_op(Tensor out, Tensor x, Tensor weight, double eps, double offset) {
  NormArgs args = norm_arguments({"rms_norm", out}, out, x, weight, eps, offset, nullptr);
  rms_norm(args, Stream(out));
}

void add_rms_norm_op(Tensor out, Tensor x, Tensor residual, Tensor weight, double eps, double offset) {
  NormArgs args = norm_arguments({"add_rms_norm", out}, out, x, weight, eps, offset, &residual);
  rms_norm(args, Stream(out));
}

void gate_op(Tensor out, Tensor x, int64_t kind) {
  ActivationArgs args = gate_arguments({"gate", out}, out, x, kind);
  gate(args, Stream(out));
}

void rope_op(Tensor x, Tensor cos, Tensor sin, int64_t rotation) {
  RopeArgs args = rope_arguments({"rope", x}, x, cos, sin, rotation);
  rope(args, Stream(x));
}

void store_op(Tensor key, Tensor value, Tensor key_pages, Tensor value_pages, Tensor slots) {
  StoreArgs args = store_arguments({"store", key}, key, value, key_pages, value_pages, slots);
  store(args, Stream(key));
}

// pages: [caches, pages, …]. Copies pages `sources` to pages `targets` in each cache.
void copy_cache_pages_op(Tensor pages, Tensor sources, Tensor targets) {
  Op op("copy_cache_pages", pages);
  Argument page_data(op, "pages", pages), from(op, "sources", sources), to(op, "targets", targets);
  if (page_data.dims() < 2) refuse(op.name, ": pages has fewer than 2 dimensions, [caches, pages, …] expected");
  page_data.dense();
  from.shaped({ANY}).of(ScalarType::Long).below(page_data.size(1));
  to.shaped({from.size(0)}).of(ScalarType::Long).below(page_data.size(1));
  CopyCachePagesArgs args{};
  args.pages = page_data.data();
  args.sources = from.data<int64_t>();
  args.targets = to.data<int64_t>();
  args.caches = page_data.size(0);
  args.copies = from.size(0);
  args.limit = page_data.size(1);
  args.page_bytes = page_data.count() ? page_data.count() / (args.caches * args.limit) * page_data.bytes() : 0;
  if (args.bytes() == 0) return;
  Tensor buffer = torch::stable::new_empty(pages, {args.bytes()}, ScalarType::Byte);
  args.shared = buffer.data_ptr();
  copy_cache_pages(args, Stream(pages));
}

void append_op(Tensor qkv, Optional query_norm, Optional key_norm, double eps, double offset, Tensor cos, Tensor sin,
               int64_t rotation, Tensor slots, Tensor key_pages, Tensor value_pages) {
  AppendArgs args = append_arguments({"append", qkv}, qkv, query_norm ? &*query_norm : nullptr,
                                     key_norm ? &*key_norm : nullptr, eps, offset, cos, sin, rotation, slots,
                                     key_pages, value_pages);
  append(args, Stream(qkv));
}

void embedding_op(Tensor out, Tensor tokens, Tensor weight, double scale) {
  EmbeddingArgs args = embedding_arguments({"embedding", out}, out, tokens, weight, scale);
  embedding(args, Stream(out));
}

// Sets upper limits of the properties of all GPUs; 0: no limit.
void limit_gpu_op(int64_t major, int64_t minor, int64_t processors, int64_t shared_bytes) {
  const char* op = "limit_gpu";
  Gpu limits{};
  limits.major = (int)check_range(op, "major", major ? major : INT_MAX, 1, INT_MAX);
  limits.minor = (int)check_range(op, "minor", minor, 0, 9);
  limits.processors = (int)check_range(op, "processors", processors ? processors : INT_MAX, 1, INT_MAX);
  limits.shared_limit = (int)check_range(op, "shared_bytes", shared_bytes ? shared_bytes : INT_MAX, 1, INT_MAX);
  gpu_table = GpuTable{limits};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  library.def("limit_gpu(int major, int minor, int processors, int shared_bytes) -> ()");
  library.def("copy_cache_pages(Tensor(a!) pages, Tensor sources, Tensor targets) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm_op));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm_op));
  library.impl("gate", TORCH_BOX(&gate_op));
  library.impl("rope", TORCH_BOX(&rope_op));
  library.impl("store", TORCH_BOX(&store_op));
  library.impl("copy_cache_pages", TORCH_BOX(&copy_cache_pages_op));
  library.impl("append", TORCH_BOX(&append_op));
  library.impl("embedding", TORCH_BOX(&embedding_op));
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CompositeExplicitAutograd, library) {
  library.impl("limit_gpu", TORCH_BOX(&limit_gpu_op));
}

}  // namespace localllm::cuda
