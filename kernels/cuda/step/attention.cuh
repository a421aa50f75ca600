// Attention of a decode step: each block computes its unit of attention (unit.cuh). Cached keys and values are
// prefetched before the queries of the layer are available. The new key and value come from the qkv product through
// shared memory, not from the cache.
#pragma once

#include "product.cuh"
#include "unit.cuh"

namespace localllm::cuda {
namespace {

template <int D>
class Attention {
 public:
  static constexpr int PAIRS = D / 2, LANE_DIMS = D / 32;  // LANE_DIMS: dims per lane

  // Writes the unit of this block to shared memory. The consumer warps may read it after the next sync_consumers().
  __device__ explicit Attention(const Block& b) : b_(b) {
    if (threadIdx.x == 0) block_unit() = Unit(b);
  }

  // Reads the words of queries, keys and values; publishes the words of the attention outputs.
  __device__ void run(int layer, uint32_t epoch) const {
    const Unit& u = block_unit();
    if (u.chunk >= u.chunks) return;
    attend(u, layer, epoch);
    if (u.chunks > 1) merge(u, epoch);
  }

 private:
  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int warp() { return threadIdx.x / 32; }
  __device__ Unit& block_unit() const { return *b_.pointer<Unit>(b_.plan.unit); }
  // A vector in shared memory. Index 0 to 7: query heads; 8: the new key; 9: the new value. The partial results
  // of the warps follow the vectors.
  __device__ __nv_bfloat16* vector(int index) const { return b_.pointer<__nv_bfloat16>(b_.plan.x[1]) + index * D; }
  __device__ float* partial(int warp, int head) const {  // D sums, peak, total
    return b_.pointer<float>(b_.plan.x[1] + 10 * D * 2) + (warp * b_.plan.group + head) * (D + 2);
  }
  __device__ uint64_t* chunk_words(const Unit& u, int chunk) const {
    return b_.words(b_.plan.partials) + int64_t(u.head * MAX_STEP_CHUNKS + chunk) * b_.plan.partial_words;
  }
  __device__ void publish_pair(const Unit& u, int pair_index, float one, float other, uint32_t epoch) const {
    const Exchange& to = b_.plan.products[OUT].from;
    const uint32_t both = pair<__nv_bfloat16>(one, other);
    uint64_t* words = b_.words(to.offset) + u.head * b_.plan.group * PAIRS + pair_index;
#pragma unroll 1
    for (int copy = 0; copy < COPIES; copy++, words += to.pairs) publish(words, both, epoch);
  }

  // Loads this warp's share of the prefetched keys and values into registers.
  __device__ void load_prefetched(Warp<__nv_bfloat16, D>& state, int count) const {
    const uint32_t keys = hopper::address(memory + b_.plan.cache) + state.t * 16;
    const uint32_t values = hopper::address(memory + b_.plan.cache) + CACHED * Plan::key_pitch(D) + state.g * 16;
    const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int position = warp() * STEP + state.g + 8 * half;
#pragma unroll
      for (int j = 0; j < D / 32; j++)
        state.key[half][j] = position < count ? shared_vector(keys + position * Plan::key_pitch(D) + j * 64) : none;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int position = warp() * STEP + 2 * state.t + i % 2 + 8 * (i / 2);
#pragma unroll
      for (int v = 0; v < D / 64; v++)
        state.value[i][v] = position < count ? shared_vector(values + position * Plan::value_pitch(D) + v * 128) : none;
    }
  }

  __device__ void attend(const Unit& u, int layer, uint32_t epoch) const {
    DecodeArgs cache{};
    const int64_t first = layer * b_.a.layer_stride + u.head * b_.a.head_stride;
    cache.keys = static_cast<const __nv_bfloat16*>(b_.a.keys) + first;
    cache.values = static_cast<const __nv_bfloat16*>(b_.a.values) + first;
    cache.slot = b_.a.slot_stride;
    cache.scale = b_.a.scale;
    constexpr int STRIDE = CONSUMERS * STEP;
    static_assert(STRIDE == CACHED);
    const int new_position = u.has_new_token() ? u.new_position : -1;
    int base = u.begin + warp() * STEP;
    int next = u.slot_of(b_, base + STRIDE + lane() % STEP);
    Warp<__nv_bfloat16, D> state;
    state.start();
    if (b_.plan.prefetched) {
      if (u.prefetched() > 0) hopper::wait_barrier(b_.cache_full(), layer & 1);
      load_prefetched(state, u.prefetched());
    } else {
      const int slot = u.slot_of(b_, base + lane() % STEP);
      state.load_keys(cache, 0, slot, base, u.stored);
      state.load_values(cache, 0, slot, base, u.stored);
    }
#pragma unroll 1
    for (int head = warp(); head < b_.plan.group + (new_position < 0 ? 0 : 2); head += CONSUMERS)
      prepare_head(u, head, layer, epoch);
    sync_consumers();
    hopper::release_stage(b_.cache_empty());
    const uint32_t query = hopper::address(vector(state.g) + state.t * 8);
#pragma unroll 1
    for (; base < u.end; base += STRIDE) {
      if (new_position >= base && new_position < base + STEP) insert_new(state, new_position - base);
      const int after = u.slot_of(b_, base + 2 * STRIDE + lane() % STEP);
#pragma unroll
      for (int j = 0; j < D / 32; j++)  // reloaded in each iteration, to save registers
        state.query[j] = state.g < b_.plan.group ? shared_vector(query + j * 64) : make_uint4(0, 0, 0, 0);
      uint32_t weights[2];
      state.softmax(cache, base, u.end, weights);
      state.load_keys(cache, 0, next, base + STRIDE, u.stored);
      state.attend(weights);
      state.load_values(cache, 0, next, base + STRIDE, u.stored);
      next = after;
    }
    write_partial(state);
    sync_consumers();
    combine(u, epoch);
    sync_consumers();  // the buffer may be overwritten by the next activations
  }

  // One warp prepares one query head, the key or the value: norm, RoPE, rounding; stores key and value to the cache.
  __device__ void prepare_head(const Unit& u, int head, int layer, uint32_t epoch) const {
    const int heads = b_.a.heads, kv_heads = b_.a.kv_heads, first_dim = lane() * LANE_DIMS;
    const bool query = head < b_.plan.group, value = head == b_.plan.group + 1;
    const int source = query ? u.head * b_.plan.group + head : heads + (value ? kv_heads : 0) + u.head;
    const auto* norm = reinterpret_cast<const __nv_bfloat16*>(b_.layer(layer).head_norms[query ? 0 : 1]);
    float x[LANE_DIMS], c[LANE_DIMS], s[LANE_DIMS], weights[LANE_DIMS];
    const bool has_norm = norm && !value, first_half = first_dim < PAIRS;
    if (has_norm) load<LANE_DIMS>(norm + first_dim, weights);
    if (!value) {
      load<LANE_DIMS>(b_.a.cos + first_dim % PAIRS, c);
      load<LANE_DIMS>(b_.a.sin + first_dim % PAIRS, s);
    }
    const int64_t slot = query ? 0 : *b_.a.slot;
    read_words_of(b_.words(b_.plan.products[QKV].to.offset) + source * PAIRS + first_dim / 2, epoch, x);
    if (has_norm) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < LANE_DIMS; i++) squares += x[i] * x[i];
      float scale = rsqrtf(sum_of_warp(squares) / D + b_.a.eps);
#pragma unroll
      for (int i = 0; i < LANE_DIMS; i++) x[i] *= scale * (weights[i] + b_.a.offset);
    }
    if (!value) {
#pragma unroll
      for (int i = 0; i < LANE_DIMS; i++) {
        float other = __shfl_xor_sync(ALL, x[i], 16);
        x[i] = first_half ? x[i] * c[i] - other * s[i] : x[i] * c[i] + other * s[i];
      }
    }
    save<LANE_DIMS>(vector(query ? head : value ? 9 : 8) + first_dim, x);
    if (query || slot < 0 || slot >= b_.a.limit) return;
    auto* cache = static_cast<__nv_bfloat16*>(value ? b_.a.values : b_.a.keys);
    save<LANE_DIMS>(cache + layer * b_.a.layer_stride + slot * b_.a.slot_stride + u.head * b_.a.head_stride + first_dim,
                    x);
  }
  static __device__ void read_words_of(const uint64_t* from, uint32_t epoch, float (&x)[LANE_DIMS]) {
    if constexpr (LANE_DIMS == 4) {
      uint2 data = poll(from, epoch);
      load<4>(reinterpret_cast<const __nv_bfloat16*>(&data), x);
    } else {  // two lanes read the same two words; each uses one
      bool second = threadIdx.x % 2;
      uint2 data = poll(from - second, epoch);
      uint32_t word = second ? data.y : data.x;
      load<2>(reinterpret_cast<const __nv_bfloat16*>(&word), x);
    }
  }

  // Inserts the new key and value at position base + offset.
  __device__ void insert_new(Warp<__nv_bfloat16, D>& state, int offset) const {
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (state.g + 8 * half == offset)
#pragma unroll
        for (int j = 0; j < D / 32; j++)
          state.key[half][j] = *reinterpret_cast<const uint4*>(vector(8) + j * 32 + state.t * 8);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (2 * state.t + i % 2 + 8 * (i / 2) == offset)
#pragma unroll
        for (int v = 0; v < D / 64; v++)
          state.value[i][v] = *reinterpret_cast<const uint4*>(vector(9) + v * 64 + state.g * 8);
  }

  // Writes this warp's partial result to shared memory.
  __device__ void write_partial(const Warp<__nv_bfloat16, D>& state) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int head = 2 * state.t + h;
      float total = column_sum(state.total[h]);
      if (head >= b_.plan.group) continue;
      float* to = partial(warp(), head);
      if (state.g == 0) {
        to[D] = state.peak[h];
        to[D + 1] = total;
      }
#pragma unroll
      for (int i = 0; i < D / 16; i++)
        *reinterpret_cast<float2*>(to + (i / 4) * 64 + state.g * 8 + 2 * (i % 4)) =
            make_float2(state.acc[i][h], state.acc[i][2 + h]);
    }
  }

  // Combines the partial results of the warps. Publishes the outputs, or with several chunks the sums of this chunk.
  __device__ void combine(const Unit& u, uint32_t epoch) const {
    for (int i = threadIdx.x; i < b_.plan.group * PAIRS; i += CONSUMER_THREADS) {
      const int head = i / PAIRS, dim = i % PAIRS * 2;
      float peak = -INFINITY, total = 0.0f;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < CONSUMERS; w++) peak = fmaxf(peak, partial(w, head)[D]);
#pragma unroll
      for (int w = 0; w < CONSUMERS; w++) {
        const float* from = partial(w, head);
        float weight = exp2f(from[D] - peak);
        float2 partial_sum = *reinterpret_cast<const float2*>(from + dim);
        total += weight * from[D + 1];
        sum.x += weight * partial_sum.x;
        sum.y += weight * partial_sum.y;
      }
      if (u.chunks == 1) {
        publish_pair(u, i, sum.x / total, sum.y / total, epoch);
        continue;
      }
      uint64_t* to = chunk_words(u, u.chunk);
      publish(to + 2 * i, sum.x, epoch);
      publish(to + 2 * i + 1, sum.y, epoch);
      uint64_t* stats = to + b_.plan.group * D + 2 * head;
      if (dim == 0) {
        publish(stats, peak, epoch);
        publish(stats + 1, total, epoch);
      }
    }
  }

  // Merges the chunks of a kv head. The block of each chunk merges a share of the outputs. `width` lanes read one chunk
  // each for the same pair of outputs; a warp merges 32 / width pairs at a time, to overlap the L2 latency.
  __device__ void merge(const Unit& u, uint32_t epoch) const {
    int width = 2;
    while (width < u.chunks) width *= 2;
    const int pairs = b_.plan.group * PAIRS, stop = pairs * (u.chunk + 1) / u.chunks;
    const int chunk = lane() % width, concurrent = 32 / width;
    const bool valid = chunk < u.chunks;
    const uint64_t* from = chunk_words(u, valid ? chunk : 0);
    // Only one warp polls, and only one word of each chunk: more polling would delay the writes that it waits for.
    if (warp() == 0) poll(from + b_.plan.group * D, epoch);
    sync_consumers();
    for (int first = pairs * u.chunk / u.chunks + warp() * concurrent; first < stop; first += CONSUMERS * concurrent) {
      const int lane_pair = first + lane() / width, i = min(lane_pair, stop - 1);
      const uint64_t* stats = from + b_.plan.group * D + 2 * (i / PAIRS);
      Words read_sums = read_words(from + 2 * i), read_stats = read_words(stats);
      uint2 stat = poll(read_stats, stats, epoch), sums = poll(read_sums, from + 2 * i, epoch);
      float chunk_peak = valid ? __uint_as_float(stat.x) : -INFINITY, peak = chunk_peak;
      for (int distance = 1; distance < width; distance *= 2)
        peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, distance));
      float weight = exp2f(chunk_peak - peak), total = weight * __uint_as_float(stat.y);
      float one = weight * __uint_as_float(sums.x), other = weight * __uint_as_float(sums.y);
      for (int distance = 1; distance < width; distance *= 2) {
        total += __shfl_xor_sync(ALL, total, distance);
        one += __shfl_xor_sync(ALL, one, distance);
        other += __shfl_xor_sync(ALL, other, distance);
      }
      if (chunk == 0 && lane_pair < stop) publish_pair(u, i, one / total, other / total, epoch);
    }
  }

  const Block& b_;
};

}  // namespace
}  // namespace localllm::cuda
