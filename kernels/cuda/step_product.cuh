// The products of a step: warps share a tile's inputs, and its sums meet in shared memory.
//
//   lane = 4 g + t     weights: output g of 8, 8 inputs of 32; activations: row g, the same inputs
//                      sums: row g, outputs 2 t and 2 t + 1
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

// Where a product's answers go: every two neighbours are a word. `plain` instead where they are the step's own.
struct Target {
  uint64_t* words;
  int width;  // of a row: pairs
  uint32_t turn;
  void* plain = nullptr;

  __device__ void put(int row, int at, float one, float other) const {
    const int place = row * width + at;
    if (plain) static_cast<__nv_bfloat162*>(plain)[place] = __floats2bfloat162_rn(one, other);
    else publish(words + place, pair<__nv_bfloat16>(one, other), turn);
  }
};

class Multiplier {
 public:
  __device__ explicit Multiplier(const Block& b) : b_(b), ring_{b.room.stages} {}
  __device__ bool takes_part(int phase) const { return order_.first() < product_of(b_.a, phase).tiles; }

  // This block's tiles of a product of the activations in shared memory.
  __device__ void run(int layer, int phase, const Target& to) {
    const Product p = product_of(b_.a, phase);
    const Lane lane(b_);
    int tile = order_.first(), held = 0, begun = tile;
    for (; tile < p.tiles; tile += gridDim.x) {
      float sums[4][4] = {};
      for (int k = 0; k < p.ins; k += COLUMNS) add_stage(sums, lane, k, p.ins - k);
      if (lane.g < b_.a.rows)
        *reinterpret_cast<float2*>(table(held, lane.warp, lane.g) + 2 * lane.t) =
            make_float2(sums[0][0] + sums[1][0] + (sums[2][0] + sums[3][0]),
                        sums[0][1] + sums[1][1] + (sums[2][1] + sums[3][1]));
      if (++held == TILES) {
        finish(layer, phase, begun, held, to);
        held = 0, begun = tile + gridDim.x;
      }
    }
    if (held > 0) finish(layer, phase, begun, held, to);
    order_.pass(p.tiles);
  }

 private:
  __device__ float* table(int at, int warp, int row) const {
    return b_.at<float>(b_.room.sums) + (((second_ * TILES + at) * CONSUMERS + warp) * b_.a.rows + row) * 8;
  }
  struct Lane {  // recomputed for every product: attention has no registers to spare
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint32_t weights, x;  // its place in the first stage of the ring, and among the activations

    __device__ explicit Lane(const Block& b)
        : weights(hopper::address(b.memory + b.room.ring) + g * PITCH + t * 16),
          x(hopper::address(b.memory + b.room.x) + g * b.room.pitch + t * 16) {}
  };
  __device__ void add_stage(float (&sums)[4][4], const Lane& lane, int k, int left) {
    hopper::await(b_.full(ring_.slot), ring_.parity);
    const uint32_t from = lane.weights + ring_.slot * STAGE, x_from = lane.x + k * 2;
    left >= COLUMNS ? add<true>(sums, lane, from, x_from, 0) : add<false>(sums, lane, from, x_from, left / 32);
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(b_.empty(ring_.slot));
    ring_.next();
  }
  template <bool WHOLE>
  __device__ void add(float (&sums)[4][4], const Lane& lane, uint32_t from, uint32_t x_from, int chunks) const {
    uint4 w[4], x[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      int chunk = lane.warp + CONSUMERS * c;
      bool there = WHOLE || chunk < chunks;
      w[c] = x[c] = make_uint4(0, 0, 0, 0);
      if (there) w[c] = shared_vector(from + chunk * 64);
      if (there && lane.g < b_.a.rows) x[c] = shared_vector(x_from + chunk * 64);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
      multiply<__nv_bfloat16>(sums[c], x[c].x, 0, x[c].y, 0, w[c].x, w[c].y);
      multiply<__nv_bfloat16>(sums[c], x[c].z, 0, x[c].w, 0, w[c].z, w[c].w);
    }
  }
  // Up to TILES tiles, the first of them `begun`: what the warps have found, added in a fixed order. The other table is
  // written meanwhile.
  __device__ void finish(int layer, int phase, int begun, int held, const Target& to) {
    meet();
    const bool gated = phase == GATE_UP;
    const int logs = gated ? 1 : 2;  // pairs of answers of a tile
    const float* bias = reinterpret_cast<const float*>(b_.layer(layer).biases[phase]);
    for (int i = threadIdx.x; i < b_.a.rows * TILES << logs; i += TEAM) {
      int own = i & ((1 << logs) - 1), at = (i >> logs) % TILES, row = i / TILES >> logs;
      if (at >= held) continue;
      int tile = begun + at * gridDim.x;
      if (!gated) {
        float2 sum = added(at, row, 2 * own, bias, tile * 8 + 2 * own);
        to.put(row, tile * 4 + own, sum.x, sum.y);
        continue;
      }
      int first = tile * 4 + 2 * own;
      float2 gate = added(at, row, 2 * own, bias, first), up = added(at, row, 4 + 2 * own, bias, b_.a.inner + first);
      to.put(row, tile * 2 + own, activated(b_.a.gate, rounded(gate.x)) * rounded(up.x),
             activated(b_.a.gate, rounded(gate.y)) * rounded(up.y));
    }
    second_ ^= 1;
  }
  __device__ float2 added(int at, int row, int column, const float* bias, int output) const {
    float2 sum = bias ? make_float2(bias[output], bias[output + 1]) : make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < CONSUMERS; w++) {
      float2 part = *reinterpret_cast<const float2*>(table(at, w, row) + column);
      sum.x += part.x, sum.y += part.y;
    }
    return sum;
  }

  const Block& b_;
  Ring ring_;
  Order order_;
  int second_ = 0;     // which of two tables
};

}  // namespace
}  // namespace localllm::cuda
