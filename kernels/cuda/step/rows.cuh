// The activations of a product. Every block reads them from the words in global memory that all blocks published
// (words.cuh), and stores them in its shared memory. Before qkv and gate_up it also adds them to its copy of the
// residual stream and normalises.
#pragma once

#include "product.cuh"

namespace localllm::cuda {
namespace {

constexpr int READS_IN_FLIGHT = 4;  // 16-byte reads in flight per thread

// Starts the copy of a norm's weights to shared memory, long before `normalise` reads them. Each thread copies the
// weights that it will read.
__device__ inline void prefetch_norm(const Block& b, uint64_t norm) {
#pragma unroll 1
  for (int quad = threadIdx.x; quad < b.a.hidden / 4; quad += CONSUMER_THREADS)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(hopper::address(memory + b.plan.norm) + quad * 8),
                 "l"(norm + quad * 8)
                 : "memory");
}
__device__ inline void wait_norm() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ inline void unpack_quad(uint2 quad, float (&values)[4]) {
  load<4>(reinterpret_cast<const __nv_bfloat16*>(&quad), values);
}

__device__ inline uint2 pack_quad(const float (&values)[4]) {
  return {pair<__nv_bfloat16>(values[0], values[1]), pair<__nv_bfloat16>(values[2], values[3])};
}

// Divides `width` activations into groups of 4. Calls call(quad) with the index of each group of this thread.
template <class Call>
__device__ inline void for_thread_quads(int width, Call&& call) {
#pragma unroll 1
  for (int quad = threadIdx.x; quad < width / 4; quad += CONSUMER_THREADS) call(quad);
}

// Reads the activations [width] of a phase from the words of all blocks. Only one lane per warp polls at a time: more
// polling would delay the writes that it waits for.
__device__ inline void read_activations(const Block& b, int phase, const uint64_t* words, int width, uint32_t epoch) {
  const Activations x(b, phase);
  const int quads = width / 4, lane = threadIdx.x % 32;
  if (lane == 0 && threadIdx.x < quads) poll(words + threadIdx.x * 2, epoch);
  __syncwarp();
#pragma unroll 1
  for (int begin = 0; begin < quads; begin += READS_IN_FLIGHT * CONSUMER_THREADS) {
    const int first = begin + threadIdx.x;
    Words read[READS_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < READS_IN_FLIGHT; i++)
      if (int quad = first + i * CONSUMER_THREADS; quad < quads) read[i] = read_words(words + quad * 2);
    while (true) {
      int missing = quads;
#pragma unroll
      for (int i = 0; i < READS_IN_FLIGHT; i++)
        if (int quad = first + i * CONSUMER_THREADS; quad < quads && !have_epoch(read[i], epoch)) missing = quad;
      const unsigned waiting = __ballot_sync(ALL, missing < quads);
      if (!waiting) break;
      if (lane == __ffs(waiting) - 1) poll(words + missing * 2, epoch);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < READS_IN_FLIGHT; i++)
        if (int quad = first + i * CONSUMER_THREADS; quad < quads && !have_epoch(read[i], epoch))
          read[i] = read_words(words + quad * 2);
    }
#pragma unroll
    for (int i = 0; i < READS_IN_FLIGHT; i++)
      if (int quad = first + i * CONSUMER_THREADS; quad < quads)
        x.put(quad, {uint32_t(read[i].first), uint32_t(read[i].second)});
  }
}

// stream += x; x = norm(stream), with the weights that `prefetch_norm` copied.
__device__ inline void normalise(const Block& b) {
  const Activations x(b, QKV);
  uint2* stream = b.pointer<uint2>(b.plan.stream);
  float* squares = b.pointer<float>(b.plan.squares);  // [CONSUMERS]
  float sum = 0.0f;
  for_thread_quads(b.a.hidden, [&](int quad) {
    float added[4], before[4];
    unpack_quad(x.get(quad), added);
    unpack_quad(stream[quad], before);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      added[i] = rounded(added[i] + before[i]);
      sum += added[i] * added[i];
    }
    stream[quad] = pack_quad(added);
  });
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  wait_norm();
  sync_consumers();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < CONSUMERS; warp++) sum += squares[warp];
  const float scale = rsqrtf(sum * b.plan.inverse + b.a.eps);
  const uint2* weights = b.pointer<uint2>(b.plan.norm);
  for_thread_quads(b.a.hidden, [&](int quad) {
    float values[4], weight[4];
    unpack_quad(stream[quad], values);
    unpack_quad(weights[quad], weight);
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] *= scale * (weight[i] + b.a.offset);
    x.put(quad, pack_quad(values));
  });
}

// For the first layer: loads the inputs of the step as its activations and residual stream.
__device__ inline void load_inputs(const Block& b) {
  for_thread_quads(b.a.hidden, [&](int quad) {
    b.pointer<uint2>(b.plan.stream)[quad] = static_cast<const uint2*>(b.a.stream)[quad];
    Activations(b, QKV).put(quad, static_cast<const uint2*>(b.a.x)[quad]);
  });
}

}  // namespace
}  // namespace localllm::cuda
