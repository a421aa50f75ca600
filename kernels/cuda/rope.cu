// Rotary embedding, in place: a thread turns one pair.
#include "vec.cuh"

namespace localllm::cuda {

namespace {

template <class T>
__global__ void turn(T* x, const float* cos, const float* sin, bool interleaved, int64_t pairs, int64_t heads,
                     int64_t dim, int64_t half, int64_t stride) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < pairs; i += gridDim.x * int64_t(blockDim.x)) {
    int64_t pair = i % half, head = i / half % heads, token = i / half / heads;
    T* start = x + token * stride + head * dim;
    T* first = start + (interleaved ? 2 * pair : pair);
    T* second = interleaved ? first + 1 : first + half;
    float c = cos[token * half + pair], s = sin[token * half + pair], a = to_float(*first), b = to_float(*second);
    from_float(a * c - b * s, first);
    from_float(b * c + a * s, second);
  }
}

}  // namespace

void rope(const RopeArgs& args, cudaStream_t stream) {
  int64_t pairs = args.tokens * args.heads * args.half;
  if (pairs == 0) return;
  constexpr int threads = 256;
  int64_t blocks = (pairs + threads - 1) / threads;
  with_type(args.type, [&](auto t) {
    using T = decltype(t);
    turn<T><<<unsigned(blocks < MAX_GRID ? blocks : MAX_GRID), threads, 0, stream>>>(
        static_cast<T*>(args.x), args.cos, args.sin, args.rotation == Rotation::interleaved, pairs, args.heads,
        args.dim, args.half, args.stride);
  });
  check_launch("rope");
}

}  // namespace localllm::cuda
