// Head norms, RoPE and the write of keys and values to the cache in one pass over qkv [tokens, heads + 2 kv_heads,
// dim]. Values are computed in float32 and rounded once, when they are stored.
#include <type_traits>

#include "../device/overlap.cuh"

namespace localllm::cuda {

namespace {

constexpr int WARPS = 4;
constexpr int V = 4;        // dims per vector; a lane holds two vectors
constexpr int BATCH_ITERATIONS = 2;  // value of ITERATIONS in large batches, so that all warps are resident
constexpr int RESIDENT_WARPS = 48;   // resident warps per multiprocessor

// One head of qkv: its token, its index, and its slot in the cache.
struct Head {
  int64_t token;
  int head;
  bool query, value;
  int64_t slot;  // cache slot of a key or value; 0 for queries
  bool stored;   // true: the head is a key or value whose `slot` is in the cache

  __device__ Head(const AppendArgs& args, unsigned index) {
    unsigned all_heads = unsigned(args.heads + 2 * args.kv_heads);
    token = index / all_heads;
    head = int(index % all_heads);
    query = head < args.heads;
    value = head >= args.heads + args.kv_heads;
    slot = query ? 0 : args.slots[token];
    stored = slot >= 0 && slot < args.limit;
  }
  __device__ int64_t source(const AppendArgs& args) const { return token * args.stride + head * args.dim; }
  __device__ const void* norm(const AppendArgs& args) const {
    return value ? nullptr : query ? args.query_norm : args.key_norm;
  }
  template <class C>
  __device__ C* target(const AppendArgs& args) const {
    int64_t kv_head = head - args.heads - (value ? args.kv_heads : 0);
    return static_cast<C*>(value ? args.value_pages : args.key_pages) + (slot * args.kv_heads + kv_head) * args.dim;
  }
};

__device__ inline float norm_weight(Type type, const void* norm, int offset) {
  if (type == Type::f32) return static_cast<const float*>(norm)[offset];
  if (type == Type::bf16) return to_float(static_cast<const __nv_bfloat16*>(norm)[offset]);
  return to_float(static_cast<const __half*>(norm)[offset]);
}

// The offsets of a lane's two vectors in a head. Both elements of every RoPE pair are in the same lane.
struct LaneOffsets {
  int first, second;
  bool rotated;

  __device__ LaneOffsets(const AppendArgs& args, int lane) {
    const int half = int(args.half), offset = lane * V;
    const bool neox = args.rotation == Rotation::neox, paired = neox && offset < half;
    first = paired ? offset : 2 * offset;
    second = paired ? offset + half : first + V;
    rotated = neox ? paired : first < 2 * half;
  }
  template <class T>
  __device__ void load(const T* from, float (&x)[2 * V]) const {
    cuda::load<V>(from + first, x);
    cuda::load<V>(from + second, x + V);
  }
  template <class C>
  __device__ void save(C* to, const float (&x)[2 * V]) const {
    cuda::save<V>(to + first, x);
    cuda::save<V>(to + second, x + V);
  }
};

__device__ inline void rotate(Rotation rotation, float (&x)[2 * V], const float (&cos)[V], const float (&sin)[V]) {
  auto pair = [&](float& a, float& b, int i) {
    float first = a * cos[i] - b * sin[i];
    b = b * cos[i] + a * sin[i];
    a = first;
  };
#pragma unroll
  for (int i = 0; i < V; i++)
    if (rotation == Rotation::neox) pair(x[i], x[i + V], i);
    else pair(x[2 * i], x[2 * i + 1], i);
}

// For dim up to LANES * 2 V, a multiple of 2 V. A warp computes heads of one token: 32 / LANES heads in each of
// ITERATIONS iterations. It starts the loads of all iterations before it uses the first.
template <class T, class C, int LANES, int ITERATIONS>
__global__ void __launch_bounds__(WARPS * 32) append_vectors(const __grid_constant__ AppendArgs args) {
  constexpr int HEADS_PER_WARP = 32 / LANES;
  launch_dependents();
  const int lane = int(threadIdx.x) % 32, dim = int(args.dim);
  const int heads = int(args.heads), keys = int(args.heads + args.kv_heads), all_heads = keys + int(args.kv_heads);
  const unsigned token_warps =
      unsigned(all_heads + HEADS_PER_WARP * ITERATIONS - 1) / (HEADS_PER_WARP * ITERATIONS);  // warps per token
  const unsigned warp = blockIdx.x * WARPS + threadIdx.x / 32, token = warp / token_warps;
  const int first_head = int(warp % token_warps) * HEADS_PER_WARP * ITERATIONS, own_head = first_head + lane / LANES;
  const bool inside = lane % LANES * 2 * V < dim;
  const LaneOffsets lane_offsets(args, lane % LANES);
  float weights[2 * V];
  const void* loaded_norm = nullptr;  // the norm in `weights`; no kernel writes it, so it is loaded before the wait
  auto load_norm = [&](int head) {
    const void* norm = head < heads ? args.query_norm : head < keys ? args.key_norm : nullptr;
    if (norm && norm != loaded_norm && inside) {
      if (args.norm_type == Type::f32) lane_offsets.load(static_cast<const float*>(norm), weights);
      else lane_offsets.load(static_cast<const T*>(norm), weights);
#pragma unroll
      for (float& weight : weights) weight += args.offset;
      loaded_norm = norm;
    }
    return norm != nullptr;
  };
  load_norm(own_head);
  wait_for_previous();
  if (token >= args.tokens) return;
  T* const from = static_cast<T*>(args.qkv) + token * args.stride;
  Vec<T, V> loaded[ITERATIONS][2] = {};
#pragma unroll
  for (int count = 0; count < ITERATIONS; count++) {
    int head = own_head + count * HEADS_PER_WARP;
    if (!inside || head >= all_heads) continue;
    loaded[count][0] = *reinterpret_cast<const Vec<T, V>*>(from + head * dim + lane_offsets.first);
    loaded[count][1] = *reinterpret_cast<const Vec<T, V>*>(from + head * dim + lane_offsets.second);
  }
  const int64_t slot = args.slots[token];
  const bool stored = slot >= 0 && slot < args.limit, rotated = lane_offsets.rotated && inside;
  float cos[V], sin[V];
  if (rotated && first_head < keys) {
    const int64_t offset =
        token * args.half + (args.rotation == Rotation::neox ? lane_offsets.first : lane_offsets.first / 2);
    load<V>(args.cos + offset, cos);
    load<V>(args.sin + offset, sin);
  }
#pragma unroll
  for (int count = 0; count < ITERATIONS; count++) {
    const int head = own_head + count * HEADS_PER_WARP;
    float x[2 * V], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * V; i++) {
      x[i] = to_float(loaded[count][i / V].values[i % V]);
      squares += x[i] * x[i];
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
    if (!inside || head >= all_heads) continue;
    if (load_norm(head)) {
      float scale = rsqrtf(squares / float(dim) + args.eps);
#pragma unroll
      for (int i = 0; i < 2 * V; i++) x[i] *= scale * weights[i];
    }
    if (rotated && head < keys) rotate(args.rotation, x, cos, sin);
    if (head < heads) {
      lane_offsets.save(from + head * dim, x);
    } else if (stored) {
      const bool value = head >= keys;
      C* pages = static_cast<C*>(value ? args.value_pages : args.key_pages);
      lane_offsets.save(pages + (slot * args.kv_heads + head - (value ? keys : heads)) * dim, x);
    }
  }
}

// For heads of any dim: a block is one warp and computes one head in shared memory.
template <class T, class C>
__global__ void append_numbers(AppendArgs args) {
  extern __shared__ float x[];
  launch_dependents();
  wait_for_previous();
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
    float scale = rsqrtf(sum_of_warp(squares) / float(dim) + args.eps);
    for (int i = lane; i < dim; i += 32) x[i] *= scale * (norm_weight(args.norm_type, norm, i) + args.offset);
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

bool in_vectors(const AppendArgs& args) {
  const bool normed = args.query_norm || args.key_norm;
  return args.dim <= 64 * V && args.dim % (2 * V) == 0 && args.half % V == 0 &&
         args.stride * size_of(args.type) % 16 == 0 &&
         (!normed || args.norm_type == Type::f32 || args.norm_type == args.type) &&
         aligned({args.qkv, args.query_norm, args.key_norm, args.cos, args.sin, args.key_pages, args.value_pages}, {});
}

template <class T, class C, int LANES>
void launch_vectors(const AppendArgs& args, cudaStream_t stream) {
  auto start = [&](auto kernel, int iterations) {
    int64_t heads = 32 / LANES * iterations, warps = (args.heads + 2 * args.kv_heads + heads - 1) / heads * args.tokens;
    launch_early(kernel, (warps + WARPS - 1) / WARPS, 32 * WARPS, 0, stream, args);
  };
  if ((args.heads + 2 * args.kv_heads) * args.tokens * LANES / 32 <= RESIDENT_WARPS * gpu().processors)
    start(append_vectors<T, C, LANES, 1>, 1);
  else start(append_vectors<T, C, LANES, BATCH_ITERATIONS>, BATCH_ITERATIONS);
}

template <class T, class C>
void launch(const AppendArgs& args, cudaStream_t stream) {
  int64_t heads = args.tokens * (args.heads + 2 * args.kv_heads);
  if (!in_vectors(args))
    return launch_early(append_numbers<T, C>, heads, 32, args.dim * sizeof(float), stream, args);
  if (args.dim <= 16 * V) return launch_vectors<T, C, 8>(args, stream);
  if (args.dim <= 32 * V) return launch_vectors<T, C, 16>(args, stream);
  launch_vectors<T, C, 32>(args, stream);
}

}  // namespace

void append(const AppendArgs& args, cudaStream_t stream) {
  int64_t heads = args.tokens * (args.heads + 2 * args.kv_heads);
  if (heads * args.dim == 0) return;
  if (heads > MAX_GRID || args.dim > 12288) throw std::runtime_error("append: too many heads, or dim above 12288");
  with_type(args.type, [&](auto t) {
    using T = decltype(t);
    if (args.cache_e4m3) return launch<T, __nv_fp8_e4m3>(args, stream);
    if (args.cache_type == args.type) return launch<T, T>(args, stream);
    throw std::runtime_error("append: pages must have qkv's dtype or be float8_e4m3fn");
  });
  check_launch("append");
}

}  // namespace localllm::cuda
