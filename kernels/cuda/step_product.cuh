// The products of a step: warps share a tile's inputs, and its sums meet in shared memory.
//
//   lane = 4 g + t     weights: output g of 8, 8 of 32 inputs, the 1st, 2nd, 5th and 6th of them in row g of a matrix of
//                      16 rows, the others in row g + 8: as they are loaded
//                      activations: column g of a matrix, of which 0 and 1 count: what belongs to the first 8 rows, and
//                      to the other 8
//                      sums: of lanes with t = 0, those of output g
#pragma once

#include "attention_warp.cuh"
#include "own_rows.cuh"
#include "step_ring.cuh"
#include "step_words.cuh"

namespace localllm::cuda {
namespace {

__device__ inline void meet() { hopper::sync_some(1, TEAM); }  // of the warps that multiply

__device__ inline uint4 shared_vector(uint32_t from) {
  uint4 got;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
               : "r"(from));
  return got;
}

class Multiplier {
 public:
  __device__ explicit Multiplier(const Block& b) : b_(b) {}
  __device__ bool takes_part(const Product& p) const { return order_.first() < p.tiles; }

  // This block's tiles of a product of the activations in shared memory. Every two neighbours of the answers are a word;
  // the last product's are the step's own.
  __device__ void run(int layer, int phase, uint32_t turn) {
    const Product& p = b_.plan.products[phase];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t weights = hopper::address(memory + b_.plan.ring) + g * PITCH + warp * 128 + t * 16;
    const uint32_t x_from = hopper::address(memory + b_.plan.x) + warp * 128 + t * 16;
    int tile = order_.first(), begun = tile, held = 0, k = 0, known = -1;
    uint2 x[2][2];  // of inputs from `known` on
    float sums[2][4] = {};
#pragma unroll 1
    while (tile < p.tiles) {
      const int left = p.ins - k - warp * 64;
      if (known != k) {
#pragma unroll
        for (int i = 0; i < 2; i++)
          if (i * HALF < left)
#pragma unroll
            for (int c = 0; c < 2; c++) {
              const uint4 eight = shared_vector(x_from + (k + i * HALF) * 2 + c * 64);
              x[i][c] = g % 2 ? make_uint2(eight.y, eight.w) : make_uint2(eight.x, eight.z);
            }
        known = k;
      }
      hopper::await(b_.full(ring_.slot), ring_.parity);
      const uint32_t from = weights + ring_.slot * STAGE;
      left > HALF ? add<2>(sums, x, from) : left > 0 ? add<1>(sums, x, from) : void();
      hopper::give_back(b_.empty(ring_.slot));
      ring_.next(b_);
      if ((k += COLUMNS) < p.ins) continue;
      k = 0, tile += gridDim.x;
      if (t == 0) table(held)[warp * 8 + g] = sums[0][0] + sums[1][0] + (sums[0][3] + sums[1][3]);
#pragma unroll
      for (int i = 0; i < 2; i++) sums[i][0] = sums[i][3] = 0.0f;
      if (++held < TILES && tile < p.tiles) continue;
      finish(layer, phase, turn, begun, held);
      begun = tile, held = 0;
    }
    order_.pass(p);
  }

 private:
  static constexpr int HALF = COLUMNS / 2;
  __device__ float* table(int at) const { return b_.at<float>(b_.plan.sums) + (second_ * TILES + at) * TABLE; }

  // A warp's share of a stage: 64 inputs of each half.
  template <int HALVES>
  __device__ void add(float (&sums)[2][4], const uint2 (&x)[2][2], uint32_t from) const {
    uint4 w[HALVES][2];
#pragma unroll
    for (int i = 0; i < HALVES; i++)
#pragma unroll
      for (int c = 0; c < 2; c++) w[i][c] = shared_vector(from + i * HALF * 2 + c * 64);
#pragma unroll
    for (int i = 0; i < HALVES; i++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        multiply<__nv_bfloat16>(sums[c], w[i][c].x, w[i][c].y, w[i][c].z, w[i][c].w, x[i][c].x, x[i][c].y);
  }

  // Up to TILES tiles, the first of them `begun`: what the warps have found, added in a fixed order by a thread for each
  // output and copy. The other table is written meanwhile.
  __device__ void finish(int layer, int phase, uint32_t turn, int begun, int held) {
    static_assert(COPIES * TILES * 8 == TEAM);
    meet();
    const bool gated = phase == GATE_UP, last = phase == DOWN && layer + 1 == b_.a.layer_count;
    const int out = threadIdx.x % 8, at = threadIdx.x / 8 % TILES, copy = threadIdx.x / 8 / TILES;
    const int tile = begun + at * gridDim.x;
    const bool there = at < held;
    float parts[CONSUMERS];
#pragma unroll
    for (int w = 0; w < CONSUMERS; w++) parts[w] = there ? table(at)[w * 8 + out] : 0.0f;
    const float* bias = reinterpret_cast<const float*>(b_.layer(layer).biases[phase]);
    const float shift = bias && there ? bias[gated ? out / 4 * b_.a.inner + tile * 4 + out % 4 : tile * 8 + out] : 0.0f;
#pragma unroll
    for (int distance = 1; distance < CONSUMERS; distance *= 2)
#pragma unroll
      for (int w = 0; w < CONSUMERS; w += 2 * distance) parts[w] += parts[w + distance];
    float value = parts[0] + shift;
    if (gated) {  // lanes of outputs 4 to 7 have what those of 0 to 3 gate
      value = rounded(value);
      const float up = __shfl_down_sync(ALL, value, 4);
      value = activated(b_.a.gate, value) * up;
    }
    const uint32_t both = pair<__nv_bfloat16>(value, __shfl_down_sync(ALL, value, 1));
    second_ ^= 1;
    const Exchange& to = b_.plan.products[phase].to;
    if (!there || out % 2 || (gated && out >= 4) || copy >= to.copies) return;
    const int place = (gated ? tile * 2 : tile * 4) + out / 2;
    if (!last) publish(b_.words(to.place) + copy * to.pairs + place, both, turn);
    else if (copy == 0) static_cast<uint32_t*>(b_.a.x_out)[place] = both;
  }

  const Block& b_;
  Ring ring_;
  Order order_;
  int second_ = 0;  // which of two tables
};

}  // namespace
}  // namespace localllm::cuda
