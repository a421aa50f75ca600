// Rows of the embedding table, converted to the output type and scaled. A thread computes one vector.
#include <type_traits>

#include "../device/overlap.cuh"

namespace localllm::cuda {

namespace {

template <class T, class W, int N>
__global__ void look_up(EmbeddingArgs args) {
  launch_dependents();
  wait_for_previous();
  unsigned row_vectors =
      unsigned(args.dim / N);  // vectors per row; a block computes blockDim.x of them, all of one token
  unsigned row_blocks = (row_vectors + blockDim.x - 1) / blockDim.x, row_index = blockIdx.x / row_blocks;
  unsigned i = blockIdx.x % row_blocks * blockDim.x + threadIdx.x;
  if (i < row_vectors) {
    int64_t token = args.tokens[row_index], offset = int64_t(i) * N;
    float row[N] = {};
    if (token >= 0 && token < args.vocab) load<N>(static_cast<const W*>(args.weight) + token * args.dim + offset, row);
#pragma unroll
    for (int j = 0; j < N; j++) {
      T rounded;  // the value is rounded to the output type before it is scaled
      from_float(row[j], &rounded);
      row[j] = to_float(rounded) * args.scale;
    }
    save<N>(static_cast<T*>(args.out) + row_index * args.dim + offset, row);
  }
}

}  // namespace

void embedding(const EmbeddingArgs& args, cudaStream_t stream) {
  if (args.count * args.dim == 0) return;
  bool vectors = aligned({args.out, args.weight}, {args.dim * size_of(args.type), args.dim * size_of(args.weight_type)});
  with_type(args.type, [&](auto t) {
    with_type(args.weight_type, [&](auto w) {
      using T = decltype(t);
      using W = decltype(w);
      auto start = [&](auto count) {
        constexpr int N = decltype(count)::value, THREADS = 128;
        int64_t blocks = args.count * ((args.dim / N + THREADS - 1) / THREADS);
        if (blocks > MAX_GRID) throw std::runtime_error("embedding: too many tokens");
        launch_early(look_up<T, W, N>, blocks, THREADS, 0, stream, args);
      };
      if (vectors)
        start(std::integral_constant<int, (WIDEST<T> < WIDEST<W> ? WIDEST<T> : WIDEST<W>)>{});
      else
        start(std::integral_constant<int, 1>{});
    });
  });
  check_launch("embedding");
}

}  // namespace localllm::cuda
