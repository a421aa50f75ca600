// Activations of a product, made ready in shared memory by every block for itself as they come from the others: as they
// are, or added to the residual stream, of which every block has a copy, and normalised.
#pragma once

#include "step_product.cuh"

namespace localllm::cuda {
namespace {

constexpr int AT_ONCE = 4;  // reads of 16 bytes under way, of each thread

// Of four activations: a warp makes ready for itself what it multiplies, 64 of every 512, and waits for no other.
__device__ inline int first_quad() {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  return (lane / 16 * CONSUMERS + warp) * 16 + lane % 16;
}

// A norm's weights are asked for long before they are needed, by whom they are for.
__device__ inline void ask_norm(const Block& b, uint64_t norm) {
#pragma unroll 1
  for (int quad = first_quad(); quad < b.a.hidden / 4; quad += TEAM)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(hopper::address(memory + b.plan.norm) + quad * 8),
                 "l"(norm + quad * 8)
                 : "memory");
}
__device__ inline void await_norm() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ inline void unpacked(uint2 quad, float (&values)[4]) {
  load<4>(reinterpret_cast<const __nv_bfloat16*>(&quad), values);
}

__device__ inline uint2 packed(const float (&values)[4]) {
  return {pair<__nv_bfloat16>(values[0], values[1]), pair<__nv_bfloat16>(values[2], values[3])};
}

// Calls take(quad) for this thread's quads of [width] activations: what its warp multiplies (step_product.cuh).
template <class Take>
__device__ inline void for_own_quads(int width, Take&& take) {
#pragma unroll 1
  for (int quad = first_quad(); quad < width / 4; quad += TEAM) take(quad);
}

// Activations [width] from the others' words; seen by the warp after it has synchronised.
__device__ inline void take_words(const Block& b, const uint64_t* words, int width, uint32_t turn) {
  uint2* x = b.at<uint2>(b.plan.x);
  const int quads = width / 4, first = first_quad();
  // One lane of each warp waits; all of them together would keep away what they wait for.
  if (threadIdx.x % 32 == 0 && first < quads) awaited(words + first * 2, turn);
  __syncwarp();
#pragma unroll 1
  for (int base = first; base < quads; base += AT_ONCE * TEAM) {
    Words read[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (base + i * TEAM < quads) read[i] = words_at(words + (base + i * TEAM) * 2);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (int quad = base + i * TEAM; quad < quads) x[quad] = awaited(read[i], words + quad * 2, turn);
  }
}

// The stream becomes stream + x, and x that, normalised by what was asked for.
__device__ inline void normalise(const Block& b) {
  uint2 *x = b.at<uint2>(b.plan.x), *stream = b.at<uint2>(b.plan.stream);
  float* squares = b.at<float>(b.plan.squares);  // [2, CONSUMERS]
  float sum = 0.0f;
  for_own_quads(b.a.hidden, [&](int quad) {
    float added[4], before[4];
    unpacked(x[quad], added);
    unpacked(stream[quad], before);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      added[i] = rounded(added[i] + before[i]);
      sum += added[i] * added[i];
    }
    stream[quad] = packed(added);
  });
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  await_norm();
  meet();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < CONSUMERS; warp++) sum += squares[warp];
  const float scale = rsqrtf(sum * b.plan.inverse + b.a.eps);
  const uint2* weights = b.at<uint2>(b.plan.norm);
  for_own_quads(b.a.hidden, [&](int quad) {
    float values[4], weight[4];
    unpacked(stream[quad], values);
    unpacked(weights[quad], weight);
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] *= scale * (weight[i] + b.a.offset);
    x[quad] = packed(values);
  });
}

// The step's own.
__device__ inline void take_first(const Block& b) {
  for_own_quads(b.a.hidden, [&](int quad) {
    b.at<uint2>(b.plan.stream)[quad] = static_cast<const uint2*>(b.a.stream)[quad];
    b.at<uint2>(b.plan.x)[quad] = static_cast<const uint2*>(b.a.x)[quad];
  });
}

}  // namespace
}  // namespace localllm::cuda
