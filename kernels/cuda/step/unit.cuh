// A block's share of attention: one kv head and one chunk of the context, or nothing; the same in all layers. Two
// producer warps prefetch the first CACHED keys and values of the next layer, to hide their latency from the consumer
// warps.
#pragma once

#include "ring.cuh"

namespace localllm::cuda {
namespace {

// Divides a context into `count` chunks of `size` positions; the last chunk may be shorter.
struct Chunks {
  int count, size;
  __device__ Chunks(int context, int max_count) {
    const int requested = min(max_count, (context + MIN_CHUNK - 1) / MIN_CHUNK);
    size = ((context + requested - 1) / requested + 15) / 16 * 16;
    count = (context + size - 1) / size;
  }
};

struct Unit {
  int head, chunk, chunks = 0;                 // chunks == 0: no unit
  int begin = 0, end = 0, new_position = 0;    // positions; new_position: of the token that the step computes
  int stored = 0;                                             // end of the positions that are read from the cache

  __device__ explicit Unit(const Block& b) : head(blockIdx.x % b.a.kv_heads), chunk(blockIdx.x / b.a.kv_heads) {
    const int context = max(*b.a.context, 1);  // at least one unit, else the other blocks would wait forever
    const Chunks division(context, b.plan.max_chunks);
    if (chunk >= division.count) return;
    chunks = division.count;
    begin = chunk * division.size;
    end = min(context, begin + division.size);
    new_position = context - 1;
    stored = min(end, new_position);
  }
  __device__ bool has_new_token() const { return end > new_position; }
  __device__ int prefetched() const { return min(stored - begin, CACHED); }  // number of prefetched positions
  __device__ int slot_of(const Block& b, int position) const {
    const int shift = b.a.page_shift, page = position < stored ? b.a.page_table[position >> shift] : 0;
    return (page << shift) + (position & ((1 << shift) - 1));
  }
};

// The loop of a producer warp of the cache: one warp fetches keys, another warp values.
template <int D>
__device__ inline void fetch_cache(const Block& b, bool values) {
  wait_for_previous();
  const Unit u(b);
  const int count = b.plan.prefetched ? u.prefetched() : 0, lane = threadIdx.x % 32;
  if (count <= 0) return;
  const uint64_t policy = hopper::evict_first();
  const int pitch = values ? Plan::value_pitch(D) : Plan::key_pitch(D);
  char* to = memory + b.plan.cache + (values ? CACHED * Plan::key_pitch(D) : 0);
  const char* cache = static_cast<const char*>(values ? b.a.values : b.a.keys) + u.head * b.a.head_stride * 2;
  int slots[CACHED / 32];
#pragma unroll
  for (int i = 0; i < CACHED / 32; i++) slots[i] = u.slot_of(b, u.begin + i * 32 + lane);
#pragma unroll 1
  for (int layer = 0; layer < b.a.layer_count; layer++, cache += b.a.layer_stride * 2) {
    hopper::wait_barrier(b.cache_empty(), (layer & 1) ^ 1);
    hopper::expect_bytes(b.cache_full(), count * D * 2);
#pragma unroll
    for (int i = 0; i < CACHED / 32; i++)
      if (int position = i * 32 + lane; position < count)
        hopper::copy(to + position * pitch, cache + slots[i] * b.a.slot_stride * 2, D * 2, b.cache_full(), policy);
    hopper::commit_stage(b.cache_full());
    const uint64_t norm = b.layer(layer).head_norms[values];
    if (norm && lane < D / 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(norm + lane * 128));
  }
}

}  // namespace
}  // namespace localllm::cuda
