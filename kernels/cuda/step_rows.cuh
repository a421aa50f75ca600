// Activations of a product, made ready in shared memory by every block for itself as they come from the others: as they
// are, or added to the residual stream, of which every block has a copy, and normalised.
#pragma once

#include "step_product.cuh"

namespace localllm::cuda {
namespace {

constexpr int AT_ONCE = 4;      // reads of 16 bytes under way, of each thread

// A norm's weights are asked for long before they are needed.
__device__ inline void ask_norm(const Block& b, uint64_t norm) {
  for (int k = threadIdx.x * 8; k < b.a.hidden; k += TEAM * 8)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(hopper::address(b.memory + b.room.norm) + k * 2),
                 "l"(norm + k * 2)
                 : "memory");
}
__device__ inline void await_norm() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // seen after a meeting

// Calls take(quad, its 8 bytes) for this thread's quads of [rows, width].
template <class Take>
__device__ inline void take_words(const Block& b, const uint64_t* words, int width, uint32_t turn, Take&& take) {
  const int quads = b.a.rows * (width / 4);
  for (int base = threadIdx.x; base < quads; base += AT_ONCE * TEAM) {
    Words read[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      read[i] = words_at(words + min(base + i * TEAM, quads - 1) * 2);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (int quad = base + i * TEAM; quad < quads) take(quad, awaited(read[i], words + quad * 2, turn));
  }
}

__device__ inline void unpacked(uint2 quad, float (&values)[4]) {
  load<4>(reinterpret_cast<const __nv_bfloat16*>(&quad), values);
}

__device__ inline uint2 packed(const float (&values)[4]) {
  return {pair<__nv_bfloat16>(values[0], values[1]), pair<__nv_bfloat16>(values[2], values[3])};
}

// x [rows, width] as it is.
__device__ inline void fill(const Block& b, const uint64_t* words, int width, uint32_t turn) {
  const int each = width / 4;
  take_words(b, words, width, turn, [&](int quad, uint2 got) {
    int row = b.a.rows == 1 ? 0 : quad / each;
    b.at<uint2>(b.room.x + row * b.room.pitch)[quad - row * each] = got;
  });
  meet();
}

// The stream becomes x + stream, and x that, normalised by what was asked for. At the first layer, without words, x is
// the step's own.
__device__ inline void fill_normalised(const Block& b, const uint64_t* words, uint32_t turn) {
  const int width = b.a.hidden, each = width / 4, quads = b.a.rows * each;
  float* squares = b.at<float>(b.room.squares);  // [rows, hidden / 128], each of what a warp reads at once
  uint2* stream = b.at<uint2>(b.room.stream);
  auto take = [&](int quad, uint2 got) {
    float x[4], before[4], sum = 0.0f;
    unpacked(got, x);
    unpacked(stream[quad], before);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = rounded(x[i] + before[i]);
      sum += x[i] * x[i];
    }
    stream[quad] = packed(x);
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) squares[quad / 32] = sum;
  };
  if (words) {
    take_words(b, words, width, turn, take);
  } else {
    for (int quad = threadIdx.x; quad < quads; quad += TEAM) {
      stream[quad] = static_cast<const uint2*>(b.a.stream)[quad];
      take(quad, static_cast<const uint2*>(b.a.x)[quad]);
    }
  }
  await_norm();
  meet();
  const uint2* weights = b.at<uint2>(b.room.norm);
  for (int quad = threadIdx.x; quad < quads; quad += TEAM) {
    int row = b.a.rows == 1 ? 0 : quad / each, k = quad - row * each;
    float sum = 0.0f, x[4], weight[4];
    for (int part = 0; part < each / 32; part++) sum += squares[row * (each / 32) + part];
    float scale = rsqrtf(sum / width + b.a.eps);
    unpacked(stream[quad], x);
    unpacked(weights[k], weight);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] *= scale * (weight[i] + b.a.offset);
    b.at<uint2>(b.room.x + row * b.room.pitch)[k] = packed(x);
  }
  meet();
}

}  // namespace
}  // namespace localllm::cuda
