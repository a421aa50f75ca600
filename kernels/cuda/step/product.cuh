// The products of a step. One warp computes a tile of 8 outputs without the help of other warps; if a product has few
// tiles, all warps of the block split the inputs of one tile.
//
//   lane = 4 g + t     operand A (weights): a lane has 8 of 32 inputs of output g, in memory order. Inputs 1, 2, 5
//                      and 6 of the 8 are in row g of the 16-row matrix, the others in row g + 8
//                      operand B (activations): column 0 has the inputs of rows 0 to 7, column 1 those of rows 8 to 15;
//                      other columns are not used
//                      sums: lanes with t = 0 have output g, as [row g][column 0] + [row g + 8][column 1]
#pragma once

#include "../attention/decode_warp.cuh"
#include "../products/prepared_rows.cuh"
#include "ring.cuh"
#include "words.cuh"

namespace localllm::cuda {
namespace {

// A barrier of the consumer warps.
__device__ inline void sync_consumers() { hopper::named_barrier_sync(1, CONSUMER_THREADS); }

__device__ inline uint4 shared_vector(uint32_t from) {
  uint4 data;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "r"(from));
  return data;
}

// The activations of a phase in shared memory, in the order of the lanes: of 64 inputs, lane (g, t) reads 16 bytes at
// offset 16 * (4 g + t). Consecutive phases use different buffers, because warps of a block may be in different phases.
class Activations {
 public:
  __device__ Activations(const Block& b, int phase) : words_(b.pointer<uint32_t>(b.plan.x[phase % 2])) {}
  __device__ uint2 get(int quad) const { return {words_[word_index(quad)], words_[word_index(quad) + 16]}; }
  __device__ void put(int quad, uint2 four) const {
    words_[word_index(quad)] = four.x;
    words_[word_index(quad) + 16] = four.y;
  }

 private:
  static __device__ int word_index(int quad) { return quad / 16 * 32 + quad / 2 % 4 * 4 + quad / 8 % 2 * 2 + quad % 2; }
  uint32_t* words_;
};

class Multiplier {
 public:
  __device__ explicit Multiplier(const Block& b) : b_(b) {}
  __device__ bool has_tiles(const Product& p) const { return order_.first() < p.tiles; }

  // Computes this block's tiles of a product. Two adjacent outputs are published as one word; those of the last product
  // are outputs of the step.
  __device__ void run(int layer, int phase, uint32_t epoch) {
    const Product& p = b_.plan.products[phase];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const uint32_t weights = hopper::address(memory + b_.plan.ring) + g * PITCH + lane % 4 * 16;
    const uint32_t x = hopper::address(memory + b_.plan.x[phase % 2]) + lane % 8 * 16;
    const int first = order_.first(), tiles = p.tiles_per_block + (first < p.remainder ? 1 : 0), stages = p.stages;
    const auto* bias = reinterpret_cast<const float*>(b_.layer(layer).biases[phase]);
#pragma unroll 1
    for (int done = 0; done < tiles; done += p.concurrent) {
      if (done > 0) sync_consumers();  // the next tiles reuse the ring stages of these tiles
      const int tile_index = done + (p.split ? 0 : warp);
      if (tile_index >= min(tiles, done + p.concurrent)) continue;
      const int tile = first + tile_index * gridDim.x, begin = p.split ? warp * COLUMNS : 0;
      const int end = p.split ? min(p.in_features, begin + COLUMNS) : p.in_features;
      Ring ring{ring_.index + tile_index * stages + (p.split ? warp : 0)};
      float sums[CHAINS][4] = {};
      const float shift = bias ? bias[phase == GATE_UP ? g / 4 * b_.a.inner + tile * 4 + g % 4 : tile * 8 + g] : 0.0f;
#pragma unroll 1
      for (int k = begin; k < end; k += COLUMNS, ring.index++) {
        const int slot = ring.slot(b_);
        hopper::wait_barrier(b_.full(slot), ring.parity(b_));
        add(sums, weights + slot * STAGE, x + k * 2, min(p.in_features - k, COLUMNS) / 64, g < 2);
        hopper::release_stage(b_.empty(slot));
      }
      float sum = sums[0][0] + sums[1][0] + (sums[2][0] + sums[3][0]) +
                  (sums[0][3] + sums[1][3] + (sums[2][3] + sums[3][3]));
      if (p.split) {
        float* shared = b_.pointer<float>(b_.plan.sums);  // [CONSUMERS, 8]
        if (lane % 4 == 0) shared[warp * 8 + g] = sum;
        sync_consumers();
        if (warp > 0) break;
        for (int other = 1; other < stages; other++) sum += shared[other * 8 + g];
      }
      publish_tile(layer, phase, epoch, tile, sum + shift);
    }
    ring_.index += tiles * stages;
    order_.pass(p);
  }

 private:
  static constexpr int READ_AHEAD = 4, CHAINS = 4;  // chunks read ahead; independent accumulators
  struct Chunk {                                    // the operands of a lane for 64 inputs
    uint4 w[2], x;

    // Lanes with g < 2 hold activations (has_x), the others do not read any.
    __device__ void read(uint32_t from, uint32_t x_from, bool has_x) {
      w[0] = shared_vector(from);
      w[1] = shared_vector(from + 64);
      if (has_x) x = shared_vector(x_from);
    }
    __device__ void multiply_by(float (&one)[4], float (&other)[4]) const {
      multiply<__nv_bfloat16>(one, w[0].x, w[0].y, w[0].z, w[0].w, x.x, x.y);
      multiply<__nv_bfloat16>(other, w[1].x, w[1].y, w[1].z, w[1].w, x.z, x.w);
    }
  };
  // Adds `chunks` chunks of a stage. Reads the next READ_AHEAD chunks while the current ones are multiplied.
  static __device__ void add(float (&sums)[CHAINS][4], uint32_t from, uint32_t x_from, int chunks, bool has_x) {
    if (chunks == COLUMNS / 64) {
      Chunk read[2][READ_AHEAD];
#pragma unroll
      for (int i = 0; i < READ_AHEAD; i++) read[0][i].read(from + i * 128, x_from + i * 128, has_x);
#pragma unroll
      for (int first = 0; first < COLUMNS / 64; first += READ_AHEAD)
#pragma unroll
        for (int i = 0; i < READ_AHEAD; i++) {
          const int next = first + READ_AHEAD + i, buffer = first / READ_AHEAD % 2;
          if (next < COLUMNS / 64) read[buffer ^ 1][i].read(from + next * 128, x_from + next * 128, has_x);
          read[buffer][i].multiply_by(sums[i % 2 * 2], sums[i % 2 * 2 + 1]);
        }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < chunks; i++) {
      Chunk chunk;
      chunk.read(from + i * 128, x_from + i * 128, has_x);
      chunk.multiply_by(sums[0], sums[1]);
    }
  }

  // Publishes a tile; lanes with t = 0 have output g. Each lane writes one word (two adjacent outputs) of one copy, or
  // none.
  __device__ void publish_tile(int layer, int phase, uint32_t epoch, int tile, float sum) const {
    const Exchange& to = b_.plan.products[phase].to;
    const int lane = threadIdx.x % 32;
    const bool gated = phase == GATE_UP, last = phase == DOWN && layer + 1 == b_.a.layer_count;
    const int pairs = gated ? 2 : 4, pair_index = lane & (pairs - 1), copy = gated ? lane / 2 : lane / 4;
    float one = __shfl_sync(ALL, sum, pair_index * 8), other = __shfl_sync(ALL, sum, pair_index * 8 + 4);
    if (gated) {
      const float up = __shfl_sync(ALL, sum, pair_index * 8 + 16);
      const float other_up = __shfl_sync(ALL, sum, pair_index * 8 + 20);
      one = activated(b_.a.gate, rounded(one)) * rounded(up);
      other = activated(b_.a.gate, rounded(other)) * rounded(other_up);
    }
    if (copy >= to.copies) return;
    const int word = tile * pairs + pair_index;
    const uint32_t both = pair<__nv_bfloat16>(one, other);
    if (!last) publish(b_.words(to.offset) + copy * to.pairs + word, both, epoch);
    else if (copy == 0) static_cast<uint32_t*>(b_.a.x_out)[word] = both;
  }

  const Block& b_;
  Ring ring_;
  Order order_;
};

}  // namespace
}  // namespace localllm::cuda
