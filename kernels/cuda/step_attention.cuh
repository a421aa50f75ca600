// Attention of a step's rows: a unit is a kv head of a row and a part of its context. What it reads of the cache is on
// its way before the layer's queries are there; the newest key and value never take the way through the cache.
#pragma once

#include "step_product.cuh"

namespace localllm::cuda {
namespace {

template <int D>
class Attention {
 public:
  static constexpr int PAIRS = D / 2, EACH = D / 32;  // dims of a lane

  __device__ explicit Attention(const Block& b) : b_(b), group_(b.a.heads / b.a.kv_heads) {
    most_ = min(STEP_SPLITS, max(1, int(gridDim.x) / (b.a.kv_heads * b.a.rows)));
    cache_.slot = b.a.slot, cache_.scale = b.a.scale;
  }

  // qkv of all rows -> what their heads have seen.
  __device__ void run(int layer, uint32_t turn) {
    cache_.keys = static_cast<const __nv_bfloat16*>(b_.a.keys) + layer * b_.a.layer;
    cache_.values = static_cast<const __nv_bfloat16*>(b_.a.values) + layer * b_.a.layer;
    const int units = b_.a.rows * b_.a.kv_heads * most_;
    // All are attended before any is merged: merging waits for other blocks' units.
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x)
      if (Unit u = unit_of(unit); u.part < u.parts) attend(u, layer, turn);
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x)
      if (Unit u = unit_of(unit); u.part < u.parts && u.parts > 1) merge(u, turn);
  }

 private:
  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int warp() { return threadIdx.x / 32; }
  struct Unit {
    int row, head, part, parts, begin, end, newest;  // positions; the newest one is this step's
    __device__ bool writes() const { return end > newest; }
  };
  __device__ Unit unit_of(int unit) const {
    Unit u;
    u.head = unit % b_.a.kv_heads, unit /= b_.a.kv_heads;
    u.row = unit % b_.a.rows, u.part = unit / b_.a.rows;
    int context = b_.at<int>(b_.room.contexts)[u.row];
    Parts parts(context, most_);
    u.parts = parts.count, u.begin = u.part * parts.each, u.end = min(context, u.begin + parts.each);
    u.newest = context - 1;
    return u;
  }
  // In shared memory: queries of 8 heads, the newest key and value; then what the warps have found.
  __device__ __nv_bfloat16* vector(int which) const { return b_.at<__nv_bfloat16>(b_.room.x) + which * D; }
  __device__ float* found(int warp, int head) const {  // D sums, the peak, the total
    return b_.at<float>(b_.room.x + 10 * D * 2) + (warp * group_ + head) * (D + 2);
  }
  __device__ uint64_t* part_words(const Unit& u, int part) const {
    int64_t pair = int64_t(u.row) * b_.a.kv_heads + u.head;
    return b_.words(b_.places.parts + (pair * STEP_SPLITS + part) * b_.places.each);
  }
  __device__ void publish_pair(const Unit& u, int pair_at, float one, float other, uint32_t turn) const {
    uint64_t* words = b_.words(b_.places.seen) + (u.row * b_.a.heads + u.head * group_) * PAIRS;
    publish(words + pair_at, pair<__nv_bfloat16>(one, other), turn);
  }

  __device__ void attend(const Unit& u, int layer, uint32_t turn) {
    const int64_t head_at = u.head * b_.a.head;
    const int stored = min(u.end, u.newest);  // positions that the cache has
    const int32_t* table = b_.a.page_table + u.row * b_.a.table_row;
    auto slot_of = [&](int position) {
      int page = position < stored ? table[position >> b_.a.page_shift] : 0;
      return (page << b_.a.page_shift) + (position & ((1 << b_.a.page_shift) - 1));
    };
    int base = u.begin + warp() * STEP;
    int next = slot_of(base + CONSUMERS * STEP + lane() % STEP);
    Warp<__nv_bfloat16, D> own;
    own.start();
    {
      int slot = slot_of(base + lane() % STEP);
      own.load_keys(cache_, head_at, slot, base, stored);
      own.load_values(cache_, head_at, slot, base, stored);
    }
    for (int head = warp(); head < group_ + (u.writes() ? 2 : 0); head += CONSUMERS) make_ready(u, head, layer, turn);
    meet();
    const uint32_t query = hopper::address(vector(own.g) + own.t * 8);
    for (; base < u.end; base += CONSUMERS * STEP) {
      if (u.newest >= base && u.newest < base + STEP && u.newest < u.end) take_newest(own, u.newest - base);
      int after = slot_of(base + 2 * CONSUMERS * STEP + lane() % STEP);
#pragma unroll
      for (int j = 0; j < D / 32; j++)  // every time anew: registers are scarce
        own.query[j] = own.g < group_ ? shared_vector(query + j * 64) : make_uint4(0, 0, 0, 0);
      uint32_t weights[2];
      own.weigh(cache_, base, u.end, weights);
      own.load_keys(cache_, head_at, next, base + CONSUMERS * STEP, stored);
      own.attend(weights);
      own.load_values(cache_, head_at, next, base + CONSUMERS * STEP, stored);
      next = after;
    }
    leave(own);
    meet();
    join(u, turn);
    meet();  // the memory is free for the next unit
  }

  // One head of the row's queries, or its key or value: normalised, turned, rounded, and stored.
  __device__ void make_ready(const Unit& u, int head, int layer, uint32_t turn) const {
    const int heads = b_.a.heads, kv_heads = b_.a.kv_heads, at = lane() * EACH;
    const bool query = head < group_, value = head == group_ + 1;
    const int source = query ? u.head * group_ + head : heads + (value ? kv_heads : 0) + u.head;
    const auto* norm = reinterpret_cast<const __nv_bfloat16*>(b_.layer(layer).head_norms[query ? 0 : 1]);
    float x[EACH], c[EACH], s[EACH], weights[EACH];
    const bool normed = norm && !value, first = at < PAIRS;
    if (normed) load<EACH>(norm + at, weights);
    if (!value) {
      const int64_t place = int64_t(u.row) * PAIRS + at % PAIRS;
      load<EACH>(b_.a.cos + place, c), load<EACH>(b_.a.sin + place, s);
    }
    const int64_t slot = query ? 0 : b_.a.slots[u.row];
    take(b_.words(b_.places.qkv) + (u.row * (heads + 2 * kv_heads) + source) * PAIRS + at / 2, turn, x);
    if (normed) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; i++) squares += x[i] * x[i];
      float scale = rsqrtf(sum_of_warp(squares) / D + b_.a.eps);
#pragma unroll
      for (int i = 0; i < EACH; i++) x[i] *= scale * (weights[i] + b_.a.offset);
    }
    if (!value) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        float other = __shfl_xor_sync(ALL, x[i], 16);
        x[i] = first ? x[i] * c[i] - other * s[i] : x[i] * c[i] + other * s[i];
      }
    }
    save<EACH>(vector(query ? head : value ? 9 : 8) + at, x);
    if (query || slot < 0 || slot >= b_.a.limit) return;
    auto* cache = static_cast<__nv_bfloat16*>(value ? b_.a.values : b_.a.keys);
    save<EACH>(cache + layer * b_.a.layer + slot * b_.a.slot + u.head * b_.a.head + at, x);
  }
  static __device__ void take(const uint64_t* from, uint32_t turn, float (&x)[EACH]) {
    if constexpr (EACH == 4) {
      uint2 got = awaited(from, turn);
      load<4>(reinterpret_cast<const __nv_bfloat16*>(&got), x);
    } else {  // two lanes read the same two words, of which each takes one
      bool second = threadIdx.x % 2;
      uint2 got = awaited(from - second, turn);
      uint32_t own = second ? got.y : got.x;
      load<2>(reinterpret_cast<const __nv_bfloat16*>(&own), x);
    }
  }

  // Position base + at was not in the cache.
  __device__ void take_newest(Warp<__nv_bfloat16, D>& own, int at) const {
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (own.g + 8 * half == at)
#pragma unroll
        for (int j = 0; j < D / 32; j++)
          own.key[half][j] = *reinterpret_cast<const uint4*>(vector(8) + j * 32 + own.t * 8);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (2 * own.t + i % 2 + 8 * (i / 2) == at)
#pragma unroll
        for (int v = 0; v < D / 64; v++)
          own.value[i][v] = *reinterpret_cast<const uint4*>(vector(9) + v * 64 + own.g * 8);
  }

  // What this warp has found.
  __device__ void leave(const Warp<__nv_bfloat16, D>& own) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int head = 2 * own.t + h;
      float total = column_sum(own.total[h]);
      if (head >= group_) continue;
      float* to = found(warp(), head);
      if (own.g == 0) to[D] = own.peak[h], to[D + 1] = total;
#pragma unroll
      for (int i = 0; i < D / 16; i++)
        *reinterpret_cast<float2*>(to + (i / 4) * 64 + own.g * 8 + 2 * (i % 4)) =
            make_float2(own.acc[i][h], own.acc[i][2 + h]);
    }
  }

  // Of all warps: the answer, or this part's share of it.
  __device__ void join(const Unit& u, uint32_t turn) const {
    for (int i = threadIdx.x; i < group_ * PAIRS; i += TEAM) {
      const int head = i / PAIRS, dim = i % PAIRS * 2;
      float peak = -INFINITY, total = 0.0f;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < CONSUMERS; w++) peak = fmaxf(peak, found(w, head)[D]);
#pragma unroll
      for (int w = 0; w < CONSUMERS; w++) {
        const float* from = found(w, head);
        float weight = exp2f(from[D] - peak);
        float2 part = *reinterpret_cast<const float2*>(from + dim);
        total += weight * from[D + 1];
        sum.x += weight * part.x, sum.y += weight * part.y;
      }
      if (u.parts == 1) {
        publish_pair(u, i, sum.x / total, sum.y / total, turn);
        continue;
      }
      uint64_t* to = part_words(u, u.part);
      publish(to + 2 * i, sum.x, turn), publish(to + 2 * i + 1, sum.y, turn);
      uint64_t* stats = to + group_ * D + 2 * head;
      if (dim == 0) publish(stats, peak, turn), publish(stats + 1, total, turn);
    }
  }

  // Every part of a head merges a share of its answers: a lane for each part.
  __device__ void merge(const Unit& u, uint32_t turn) const {
    const int all = group_ * PAIRS, stop = all * (u.part + 1) / u.parts;
    const uint64_t* from = part_words(u, lane() < u.parts ? lane() : 0);
    for (int i = all * u.part / u.parts + warp(); i < stop; i += CONSUMERS) {
      const uint64_t* stats = from + group_ * D + 2 * (i / PAIRS);
      Words read_sums = words_at(from + 2 * i), read_stats = words_at(stats);
      uint2 stat = awaited(read_stats, stats, turn), sums = awaited(read_sums, from + 2 * i, turn);
      bool there = lane() < u.parts;
      float own = there ? __uint_as_float(stat.x) : -INFINITY, peak = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, distance));
      float weight = exp2f(own - peak), total = sum_of_warp(weight * __uint_as_float(stat.y));
      float one = sum_of_warp(weight * __uint_as_float(sums.x)), other = sum_of_warp(weight * __uint_as_float(sums.y));
      if (lane() == 0) publish_pair(u, i, one / total, other / total, turn);
    }
  }

  const Block& b_;
  DecodeArgs cache_{};
  int group_, most_;
};

}  // namespace
}  // namespace localllm::cuda
