// Head norms, rotation and the cache's keys and values in one pass over [tokens, heads + 2 kv_heads, dim]: one warp a
// head. Everything is computed as float and rounded once, when it is stored.
#include <type_traits>

#include "overlap.cuh"

namespace localllm::cuda {

namespace {

constexpr int WARPS = 4;
constexpr int MANY = 256;    // heads for each processor, from which on it has more warps to start than it holds:
constexpr int AT_ONCE = 4;  // then a warp takes several

// A head's place among those of AppendArgs.
struct Head {
  int64_t token;
  int head;
  bool query, value;
  int64_t slot;  // of a key or value
  bool stored;   // and whether there is such a slot

  __device__ Head(const AppendArgs& args, unsigned index) {
    unsigned every = unsigned(args.heads + 2 * args.kv_heads);
    token = index / every, head = int(index % every);
    query = head < args.heads, value = head >= args.heads + args.kv_heads;
    slot = query ? 0 : args.slots[token];
    stored = slot >= 0 && slot < args.limit;
  }
  __device__ int64_t source(const AppendArgs& args) const { return token * args.stride + head * args.dim; }
  __device__ const void* norm(const AppendArgs& args) const {
    return value ? nullptr : query ? args.query_norm : args.key_norm;
  }
  template <class C>
  __device__ C* target(const AppendArgs& args) const {
    int64_t own = head - args.heads - (value ? args.kv_heads : 0);
    return static_cast<C*>(value ? args.value_pages : args.key_pages) + (slot * args.kv_heads + own) * args.dim;
  }
};

template <int V>
__device__ inline void load_norm(Type type, const void* norm, int at, float* to) {
  if (type == Type::f32) load_wide<V>(static_cast<const float*>(norm) + at, to);
  else if (type == Type::bf16) load_wide<V>(static_cast<const __nv_bfloat16*>(norm) + at, to);
  else load_wide<V>(static_cast<const __half*>(norm) + at, to);
}

// Lane l holds the V dimensions from l * V on.
template <int V>
__device__ inline void turn(const AppendArgs& args, int64_t token, int at, float* x) {
  int half = int(args.half), lanes = half / V;
  bool turned = at < 2 * half;
  const float* cos = args.cos + token * half;
  const float* sin = args.sin + token * half;
  if (args.rotation == Rotation::neox) {
    bool first = at < half;
    int partner = int(threadIdx.x) % 32 + (first ? lanes : -lanes);
    float c[V], s[V];
    if (turned) load_wide<V>(cos + (first ? at : at - half), c), load_wide<V>(sin + (first ? at : at - half), s);
#pragma unroll
    for (int i = 0; i < V; i++) {
      float other = __shfl_sync(0xffffffffu, x[i], partner & 31);
      if (turned) x[i] = first ? x[i] * c[i] - other * s[i] : x[i] * c[i] + other * s[i];
    }
  } else if (turned) {
    float c[V / 2], s[V / 2];
    load_wide<V / 2>(cos + at / 2, c), load_wide<V / 2>(sin + at / 2, s);
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
      float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * c[i] - b * s[i];
      x[2 * i + 1] = b * c[i] + a * s[i];
    }
  }
}

// For dim up to 32 * V, in whole vectors of V. A warp takes HEADS, all of which it asks for before it waits for one.
template <class T, class C, int V, int HEADS>
__global__ void append_vectors(AppendArgs args) {
  let_next_begin();
  int64_t first = (int64_t(blockIdx.x) * WARPS + threadIdx.x / 32) * HEADS;
  int64_t count = args.tokens * (args.heads + 2 * args.kv_heads);
  int at = int(threadIdx.x) % 32 * V;
  bool inside = at < args.dim;
  await_previous();
  float x[HEADS][V] = {};
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (first + h >= count) break;
    Head head(args, unsigned(first + h));
    if (inside) load_wide<V>(static_cast<const T*>(args.qkv) + head.source(args) + at, x[h]);
  }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (first + h >= count) return;
    Head head(args, unsigned(first + h));
    const void* norm = head.norm(args);
    if (norm) {
      float weights[V], squares = 0.0f;
      if (inside) load_norm<V>(args.norm_type, norm, at, weights);
#pragma unroll
      for (int i = 0; i < V; i++) squares += x[h][i] * x[h][i];
      float scale = rsqrtf(sum_of_warp(squares) / float(args.dim) + args.eps);
#pragma unroll
      for (int i = 0; i < V; i++)
        if (inside) x[h][i] *= scale * (weights[i] + args.offset);
    }
    if (!head.value) turn<V>(args, head.token, at, x[h]);
    if (!inside) continue;
    if (head.query) save_wide<V>(static_cast<T*>(args.qkv) + head.source(args) + at, x[h]);
    else if (head.stored) save_wide<V>(head.target<C>(args) + at, x[h]);
  }
}

// For heads of any shape: one warp a block, and the head in shared memory.
template <class T, class C>
__global__ void append_numbers(AppendArgs args) {
  extern __shared__ float x[];
  let_next_begin();
  await_previous();
  Head head(args, blockIdx.x);
  int dim = int(args.dim), half = int(args.half), lane = int(threadIdx.x);
  T* from = static_cast<T*>(args.qkv) + head.source(args);
  const void* norm = head.norm(args);
  float squares = 0.0f;
  for (int i = lane; i < dim; i += 32) {
    x[i] = to_float(from[i]);
    squares += x[i] * x[i];
  }
  if (norm) {
    float scale = rsqrtf(sum_of_warp(squares) / float(dim) + args.eps), weight;
    for (int i = lane; i < dim; i += 32) {
      load_norm<1>(args.norm_type, norm, i, &weight);
      x[i] *= scale * (weight + args.offset);
    }
  }
  __syncwarp();
  bool neox = args.rotation == Rotation::neox;
  for (int pair = lane; pair < half && !head.value; pair += 32) {
    int first = neox ? pair : 2 * pair, second = neox ? pair + half : 2 * pair + 1;
    float c = args.cos[head.token * half + pair], s = args.sin[head.token * half + pair];
    float a = x[first], b = x[second];
    x[first] = a * c - b * s;
    x[second] = b * c + a * s;
  }
  __syncwarp();
  for (int i = lane; i < dim; i += 32) {
    if (head.query) from_float(x[i], from + i);
    else if (head.stored) from_float(x[i], head.target<C>(args) + i);
  }
}

// The vectors that a head is dealt out in, 0: none fit.
int vector_of(const AppendArgs& args) {
  int64_t size = size_of(args.type);
  if (!aligned({args.qkv, args.query_norm, args.key_norm, args.cos, args.sin, args.key_pages, args.value_pages}, {}))
    return 0;
  for (int v : {2, 4, 8})
    if (args.dim <= 32 * v)
      return args.dim % v == 0 && args.half % v == 0 && args.stride * size % (v * size) == 0 ? v : 0;
  return 0;
}

template <class T, class C, int V>
void launch_vectors(const AppendArgs& args, int64_t heads, cudaStream_t stream) {
  auto start = [&](auto kernel, int each) {
    int64_t block = WARPS * each;
    launch_early(kernel, (heads + block - 1) / block, 32 * WARPS, 0, stream, args);
  };
  if (heads < MANY * gpu().processors)
    start(append_vectors<T, C, V, 1>, 1);
  else
    start(append_vectors<T, C, V, AT_ONCE>, AT_ONCE);
}

template <class T, class C>
void launch(const AppendArgs& args, cudaStream_t stream) {
  int64_t heads = args.tokens * (args.heads + 2 * args.kv_heads);
  switch (vector_of(args)) {
    case 2: return launch_vectors<T, C, 2>(args, heads, stream);
    case 4: return launch_vectors<T, C, 4>(args, heads, stream);
    case 8: return launch_vectors<T, C, 8>(args, heads, stream);
    default: return launch_early(append_numbers<T, C>, heads, 32, args.dim * sizeof(float), stream, args);
  }
}

}  // namespace

void append(const AppendArgs& args, cudaStream_t stream) {
  int64_t heads = args.tokens * (args.heads + 2 * args.kv_heads);
  if (heads * args.dim == 0) return;
  if (heads > MAX_GRID || args.dim > 12288) throw std::runtime_error("append: too many heads, or too large ones");
  with_type(args.type, [&](auto t) {
    using T = decltype(t);
    if (args.cache_e4m3) return launch<T, __nv_fp8_e4m3>(args, stream);
    if (args.cache_type == args.type) return launch<T, T>(args, stream);
    throw std::runtime_error("append: pages must have qkv's dtype or be float8_e4m3fn");
  });
  check_launch("append");
}

}  // namespace localllm::cuda
