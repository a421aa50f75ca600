// Gated activations. A thread computes one vector of the output.
#include "../device/overlap.cuh"

namespace localllm::cuda {

namespace {

template <Activation KIND>
__device__ inline float activated(float x) {
  if (KIND == Activation::silu) return x / (1.0f + __expf(-x));
  if (KIND == Activation::gelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

template <class T, int N, Activation KIND, class Index>
__global__ void gated(T* out, const T* x, Index vectors, Index dim, int64_t x_stride, int64_t out_stride) {
  launch_dependents();
  wait_for_previous();
  Index row_vectors = dim / N;
  for (Index i = blockIdx.x * Index(blockDim.x) + threadIdx.x; i < vectors; i += gridDim.x * Index(blockDim.x)) {
    int64_t row = i / row_vectors, offset = i % row_vectors * N;
    float gates[N], ups[N];
    load<N>(x + row * x_stride + offset, gates);
    load<N>(x + row * x_stride + dim + offset, ups);
#pragma unroll
    for (int j = 0; j < N; j++) ups[j] *= activated<KIND>(gates[j]);
    save<N>(out + row * out_stride + offset, ups);
  }
}

template <class T, int N>
void launch(const ActivationArgs& args, cudaStream_t stream) {
  int64_t vectors = args.rows * (args.dim / N);
  constexpr int threads = 256;
  int64_t blocks = (vectors + threads - 1) / threads;
  auto start = [&](auto kernel, auto index) {
    using Index = decltype(index);
    launch_early(kernel, blocks < MAX_GRID ? blocks : MAX_GRID, threads, 0, stream, static_cast<T*>(args.out),
                 static_cast<const T*>(args.x), Index(vectors), Index(args.dim), args.x_stride, args.out_stride);
  };
  auto with_index = [&](auto index) {  // 32-bit indices if they suffice: 64-bit divisions are slow
    using Index = decltype(index);
    switch (args.kind) {
      case Activation::silu: return start(gated<T, N, Activation::silu, Index>, index);
      case Activation::gelu: return start(gated<T, N, Activation::gelu, Index>, index);
      case Activation::gelu_tanh: return start(gated<T, N, Activation::gelu_tanh, Index>, index);
    }
  };
  if (vectors < MAX_GRID / 2)
    with_index(uint32_t{});
  else
    with_index(int64_t{});
}

}  // namespace

void gate(const ActivationArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.dim == 0) return;
  int64_t size = size_of(args.type);
  bool vectors = aligned({args.out, args.x}, {args.dim * size, args.x_stride * size, args.out_stride * size});
  with_type(args.type, [&](auto t) {
    using T = decltype(t);
    if (vectors)
      launch<T, WIDEST<T>>(args, stream);
    else
      launch<T, 1>(args, stream);
  });
  check_launch("gate");
}

}  // namespace localllm::cuda
