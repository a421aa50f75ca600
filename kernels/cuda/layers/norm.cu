// RMS norm. One block per row; the row stays in registers between the reduction and the scaling.
#include <algorithm>

#include "../device/overlap.cuh"

namespace localllm::cuda {

namespace {

constexpr int MAX_THREADS = 512;
constexpr int CACHED_VECTORS = 4;  // vectors per thread in registers; the rest of a longer row is read twice
constexpr int BUSY_WARPS = 16;     // warps per multiprocessor; with more warps, each thread gets several vectors

struct RowLayout {  // offset of row r of [rows, heads, dim]
  unsigned heads;
  int64_t dim, stride;
  __device__ int64_t of(unsigned row) const { return row / heads * stride + row % heads * dim; }
};

template <class T, class W, int N, bool RESIDUAL>
__global__ void __launch_bounds__(MAX_THREADS)
    normalise(T* out, const T* x, T* residual, const W* weight, RowLayout from, RowLayout to, int dim, float eps,
              float offset) {
  auto element = [&](int iteration) { return (iteration * blockDim.x + threadIdx.x) * N; };
  launch_dependents();
  if (element(0) < dim) asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + element(0)));
  wait_for_previous();

  const T* row = x + from.of(blockIdx.x);
  T* target = out + to.of(blockIdx.x);
  T* stream = RESIDUAL ? residual + int64_t(blockIdx.x) * dim : nullptr;
  float cached[CACHED_VECTORS][N];
  Vec<W, N> cached_weights[CACHED_VECTORS];  // loaded before the reduction, to hide the latency
  auto load_row = [&](int first, float* values) { load<N>((RESIDUAL ? stream : row) + first, values); };

  float squares = 0.0f;
  auto accumulate = [&](int first, float* values) {
    load<N>(row + first, values);
    if (RESIDUAL) {
      float before[N];
      load<N>(stream + first, before);
#pragma unroll
      for (int i = 0; i < N; i++) {
        T rounded;  // the norm reads the rounded values of the residual stream
        from_float(values[i] + before[i], &rounded);
        values[i] = to_float(rounded);
      }
      save<N>(stream + first, values);
    }
#pragma unroll
    for (int i = 0; i < N; i++) squares += values[i] * values[i];
  };
#pragma unroll
  for (int h = 0; h < CACHED_VECTORS; h++)  // unrolled, so that the arrays are in registers
    if (element(h) < dim) {
      cached_weights[h] = *reinterpret_cast<const Vec<W, N>*>(weight + element(h));
      accumulate(element(h), cached[h]);
    }
  for (int iteration = CACHED_VECTORS, first; (first = element(iteration)) < dim; iteration++) {
    float values[N];
    accumulate(first, values);
  }

  float scale = rsqrtf(sum_of_block(squares) / dim + eps);

#pragma unroll
  for (int h = 0; h < CACHED_VECTORS; h++) {
    int first = element(h);
    if (first >= dim) return;
    float values[N];
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = cached[h][i] * scale * (to_float(cached_weights[h].values[i]) + offset);
    save<N>(target + first, values);
  }
  for (int iteration = CACHED_VECTORS, first; (first = element(iteration)) < dim; iteration++) {
    float weights[N], values[N];
    load_row(first, values);
    load<N>(weight + first, weights);
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = values[i] * scale * (weights[i] + offset);
    save<N>(target + first, values);
  }
}

// Threads per block. With many rows, each row gets fewer threads, because the other rows keep the GPU busy.
int threads_of(int64_t rows, int64_t vectors) {
  int64_t busy = int64_t(BUSY_WARPS) * 32 * gpu().processors, vectors_of_rows = rows * vectors;
  int64_t thread_vectors = vectors_of_rows <= busy ? 1 : vectors_of_rows <= 2 * busy ? 2 : CACHED_VECTORS;
  return int(std::min<int64_t>(((vectors + thread_vectors - 1) / thread_vectors + 31) / 32 * 32, MAX_THREADS));
}

template <class T, class W, int N>
void launch(const NormArgs& args, cudaStream_t stream) {
  int64_t rows = args.rows * args.heads, vectors = (args.dim + N - 1) / N;
  int threads = threads_of(rows, vectors);
  RowLayout from{unsigned(args.heads), args.dim, args.x_stride}, to{unsigned(args.heads), args.dim, args.out_stride};
  auto start = [&](auto kernel) {
    launch_early(
        kernel, rows, threads, 0, stream, static_cast<T*>(args.out), static_cast<const T*>(args.x),
        static_cast<T*>(args.residual), static_cast<const W*>(args.weight), from, to, int(args.dim), args.eps,
        args.offset);
  };
  if (args.residual)
    start(normalise<T, W, N, true>);
  else
    start(normalise<T, W, N, false>);
}

}  // namespace

void rms_norm(const NormArgs& args, cudaStream_t stream) {
  if (args.rows * args.heads == 0 || args.dim == 0) return;
  if (args.rows * args.heads > MAX_GRID) throw std::runtime_error("rms_norm: too many rows");
  int64_t size = size_of(args.type), weight_size = size_of(args.weight_type);
  bool vectors = aligned({args.out, args.x, args.residual, args.weight},
                         {args.dim * size, args.dim * weight_size, args.x_stride * size, args.out_stride * size});
  with_type(args.type, [&](auto t) {
    using T = decltype(t);
    auto start = [&](auto w) {
      using W = decltype(w);
      constexpr int N = WIDEST<T> < WIDEST<W> ? WIDEST<T> : WIDEST<W>;
      if (vectors)
        launch<T, W, N>(args, stream);
      else
        launch<T, W, 1>(args, stream);
    };
    with_type(args.weight_type, start);  // weights keep their dtype in registers
  });
  check_launch("rms_norm");
}

}  // namespace localllm::cuda
