// Rotary position embedding, in place.
#include "../device/vec.cuh"

namespace localllm::cuda {

namespace {

// A thread rotates N adjacent pairs of one head: two vectors if pairs span both halves (neox), one if pairs are
// adjacent.
template <class T, int N, Rotation ROTATION, class Index>
__global__ void rotate(T* x, const float* cos, const float* sin, Index items, Index heads, Index dim, Index half,
                     int64_t stride) {
  Index vectors_per_head = half / N;
  for (Index i = blockIdx.x * Index(blockDim.x) + threadIdx.x; i < items; i += gridDim.x * Index(blockDim.x)) {
    Index pair = i % vectors_per_head * N, rest = i / vectors_per_head, head = rest % heads, token = rest / heads;
    T* start = x + token * stride + head * dim;
    float c[N], s[N];
    load<N>(cos + int64_t(token) * half + pair, c);
    load<N>(sin + int64_t(token) * half + pair, s);
    if (ROTATION == Rotation::neox) {
      float a[N], b[N], rotated[N];
      load<N>(start + pair, a);
      load<N>(start + half + pair, b);
#pragma unroll
      for (int j = 0; j < N; j++) {
        rotated[j] = a[j] * c[j] - b[j] * s[j];
        b[j] = b[j] * c[j] + a[j] * s[j];
      }
      save<N>(start + pair, rotated);
      save<N>(start + half + pair, b);
    } else {
      constexpr int WIDE = N == 1 ? 1 : 2 * N;  // a single pair need not be aligned
      float both[2 * N];
#pragma unroll
      for (int j = 0; j < 2 * N; j += WIDE) load<WIDE>(start + 2 * pair + j, both + j);
#pragma unroll
      for (int j = 0; j < N; j++) {
        float a = both[2 * j], b = both[2 * j + 1];
        both[2 * j] = a * c[j] - b * s[j];
        both[2 * j + 1] = b * c[j] + a * s[j];
      }
#pragma unroll
      for (int j = 0; j < 2 * N; j += WIDE) save<WIDE>(start + 2 * pair + j, both + j);
    }
  }
}

template <class T, int N, Rotation ROTATION>
void launch(const RopeArgs& args, cudaStream_t stream) {
  int64_t items = args.tokens * args.heads * (args.half / N);
  constexpr int threads = 256;
  int64_t blocks = (items + threads - 1) / threads;
  auto start = [&](auto index) {  // 32-bit indices if they suffice: 64-bit divisions are slow
    using Index = decltype(index);
    rotate<T, N, ROTATION, Index><<<unsigned(blocks < MAX_GRID ? blocks : MAX_GRID), threads, 0, stream>>>(
        static_cast<T*>(args.x), args.cos, args.sin, Index(items), Index(args.heads), Index(args.dim),
        Index(args.half), args.stride);
  };
  if (items < MAX_GRID / 2)
    start(uint32_t{});
  else
    start(int64_t{});
}

}  // namespace

void rope(const RopeArgs& args, cudaStream_t stream) {
  if (args.tokens * args.heads * args.half == 0) return;
  with_type(args.type, [&](auto t) {
    using T = decltype(t);
    constexpr int N = 4;
    int64_t size = sizeof(T);
    bool vectors = args.half % N == 0 && aligned({args.x, args.cos, args.sin}, {args.dim * size, args.stride * size});
    if (args.rotation == Rotation::neox)
      vectors ? launch<T, N, Rotation::neox>(args, stream) : launch<T, 1, Rotation::neox>(args, stream);
    else
      vectors ? launch<T, N / 2, Rotation::interleaved>(args, stream)
              : launch<T, 1, Rotation::interleaved>(args, stream);
  });
  check_launch("rope");
}

}  // namespace localllm::cuda
