// Prefill attention, a consumer warpgroup: computes scores, softmax and weighted values, and writes outputs. Hopper
// only.
#pragma once

#include "prefill_tile.cuh"

namespace localllm::cuda {
namespace {

using namespace hopper;

constexpr int CLEARED_BARRIER = 3;  // id of a named barrier; barriers 1 and 2 order the warpgroups
constexpr float LOG2_E = 1.4426950408889634f;

__device__ inline float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

template <class T>
__device__ inline uint32_t pair(float low, float high);
template <>
__device__ inline uint32_t pair<__nv_bfloat16>(float low, float high) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}
template <>
__device__ inline uint32_t pair<__half>(float low, float high) {
  __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}

// Stores a value that nothing reads. The compiler keeps it in order with wgmma and barriers, so `x` is computed before
// the wgmma and barriers that follow.
__device__ inline void store_unread(float& shared, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address(&shared)), "f"(x) : "memory");
}

// The loop of a consumer warpgroup. A thread holds some columns of two tile rows, r = 0 and 1: scores[4 j + 2 r + c] has
// position 8 j + 2 * (lane % 4) + c of the block, sums[4 j + 2 r + c] has dim 8 j + 2 * (lane % 4) + c.
template <class T, int DIM, bool CAP>
struct Consumer {
  const PrefillArgs& args;
  Shared<T, DIM>& shared;
  int warpgroup, thread, lane;  // thread: index in the warpgroup; lane: index in the warp
  Ring<STAGES> keys{}, values{};
  float scores[BLOCK / 2], sums[DIM / 2];
  uint32_t weights[BLOCK / 16][4];  // softmax weights in the layout of operand A of wgmma
  float peak[2], total[2], shrink[2];
  int visible[2];  // position of the query of tile row r, minus the thread's first position in a block
  float scale;  // softmax scale * log2(e), because the weights are computed by exp2

  __device__ int tile_row(int r) const { return warpgroup * 64 + thread / 32 * 16 + lane / 4 + 8 * r; }

  __device__ void release(uint64_t& empty) const {
    if (lane == 0) arrive(empty);
  }

  __device__ void multiply_keys(const T* query) {
    uint64_t from = descriptor(query + warpgroup * 64 * 64, ATOM, 0);
    uint64_t to = descriptor(shared.keys[keys.index], DIM / 64 * ATOM, 0);
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
      multiply<T>(scores, advance_descriptor(from, k / 4 * TILE_ROWS * 128 + k % 4 * 32),
                  advance_descriptor(to, k / 4 * ATOM + k % 4 * 32), k > 0);
    wgmma_commit();
  }

  __device__ void multiply_values() {
    uint64_t to = descriptor(shared.values[values.index], DIM / 64 * ATOM, ATOM);
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++)
      multiply<T>(sums, weights[k], advance_descriptor(to, k * 2 * (DIM / 64) * ATOM));
    wgmma_commit();
  }

  // Masks positions that the query of a tile row does not see: their scores become -inf, even if they are NaN.
  __device__ void mask(int block, int window) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int last = visible[r] - block * BLOCK, first = window > 0 ? last - window : -1;
#pragma unroll
      for (int i = 0; i < BLOCK / 4; i++) {
        int position = i / 2 * 8 + i % 2;
        float& score = scores[i / 2 * 4 + 2 * r + i % 2];
        score = position <= last && position > first ? score : -INFINITY;
      }
    }
  }

  // Online softmax (Milakov & Gimelshein, 2018): scores become weights; `shrink` is the factor for the previous sums.
  __device__ void softmax() {
    if constexpr (CAP) {
      float inner = 2.f * LOG2_E * args.scale / args.cap;
#pragma unroll
      for (float& score : scores)  // tanh x = 1 - 2 / (e^2x + 1)
        score = score == -INFINITY ? score : 1.f - __fdividef(2.f, power_of_2(fminf(score * inner, 120.f)) + 1.f);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float higher = peak[r];
#pragma unroll
      for (int i = 0; i < BLOCK / 4; i++) higher = fmaxf(higher, scores[i / 2 * 4 + 2 * r + i % 2]);
      higher = fmaxf(higher, __shfl_xor_sync(ALL, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(ALL, higher, 2));
      float level = higher == -INFINITY ? 0.f : higher * scale;
      shrink[r] = power_of_2(fmaf(peak[r], scale, -level));
      peak[r] = higher;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < BLOCK / 4; i++) {
        float& score = scores[i / 2 * 4 + 2 * r + i % 2];
        score = power_of_2(fmaf(score, scale, -level));
        sum += score;
      }
      total[r] = total[r] * shrink[r] + sum;
    }
  }

  __device__ void pack() {
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) weights[k][i] = pair<T>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
  }

  __device__ bool needs_mask(const Tile& tile, int block) const {
    int last = tile.before + tile.count - 1;
    return (block + 1) * BLOCK - 1 > tile.before || (args.window > 0 && block * BLOCK <= last - args.window);
  }

  // Zeroes the values after the end of the context: a weight of 0 times NaN would be NaN. TMA has already zeroed the
  // whole pages after the end of the context.
  __device__ void clear_values(int valid) {
    wait_barrier(shared.values_full[values.index], values.parity);
    char* tile = reinterpret_cast<char*>(shared.values[values.index]);
    constexpr int VECTORS = DIM / 8;  // vectors of 16 bytes per position
    for (int i = valid * VECTORS + warpgroup * GROUP + thread; i < BLOCK * VECTORS; i += CONSUMER_THREADS) {
      int position = i / VECTORS, vector = i % VECTORS;
      int offset = (position / 8 * (DIM / 64) + vector / 8) * ATOM + position % 8 * 128 + vector % 8 * 16;
      *reinterpret_cast<uint4*>(tile + offset) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    named_barrier_sync(CLEARED_BARRIER, CONSUMER_THREADS);
  }

  __device__ void start(const Tile& tile) {
#pragma unroll
    for (float& sum : sums) sum = 0.f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      peak[r] = -INFINITY;
      total[r] = 0.f;
      visible[r] = tile.before + min(tile_row(r) / args.group, tile.count - 1) - 2 * (lane % 4);
    }
  }

  __device__ void attend(const Tile& tile, const T* query, uint64_t& query_empty) {
    int block = tile.high;
    wait_barrier(shared.keys_full[keys.index], keys.parity);
    wgmma_fence();
    multiply_keys(query);
    wgmma_wait<0>();
    fence_registers(scores);
    release(shared.keys_empty[keys.index]);
    keys.next();
    mask(block, args.window);
    softmax();
    pack();
    if (int valid = tile.context - block * BLOCK; valid < BLOCK) clear_values(max(valid, 0));
    while (block-- > tile.low) {
      wait_barrier(shared.keys_full[keys.index], keys.parity);
      named_barrier_sync(1 + warpgroup, CONSUMER_THREADS);
      fence_registers(scores);
      fence_registers(sums);
      wgmma_fence();
      multiply_keys(query);
      wait_barrier(shared.values_full[values.index], values.parity);
      multiply_values();
      named_barrier_arrive(2 - warpgroup, CONSUMER_THREADS);
      wgmma_wait<1>();
      fence_registers(scores);
      release(shared.keys_empty[keys.index]);
      keys.next();
      if (needs_mask(tile, block)) mask(block, args.window);
      softmax();
      // Without this store, ptxas moves the wait for the weighted values ahead of the softmax.
      store_unread(shared.scratch[warpgroup * GROUP + thread], total[0] + total[1]);
      wgmma_wait<0>();
      fence_registers(sums);
      release(shared.values_empty[values.index]);
      values.next();
      pack();
#pragma unroll
      for (int i = 0; i < DIM / 2; i++) sums[i] *= shrink[i / 2 % 2];
    }
    __syncwarp();  // all lanes have read the tile from shared memory
    release(query_empty);
    wait_barrier(shared.values_full[values.index], values.parity);
    fence_registers(sums);
    wgmma_fence();
    multiply_values();
    wgmma_wait<0>();
    fence_registers(sums);
    release(shared.values_empty[values.index]);
    values.next();
  }

  // Normalises and writes the outputs of both tile rows. Four lanes hold a row; each writes 16 of 64 bytes at a time.
  __device__ void write(const Tile& tile) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int query = tile_row(r) / args.group, head = tile.kv_head * args.group + tile_row(r) % args.group;
      float row_total = total[r];
      row_total += __shfl_xor_sync(ALL, row_total, 1);
      row_total += __shfl_xor_sync(ALL, row_total, 2);
      int64_t token = tile.token + query;
      bool live = query < tile.count && token < args.tokens;
      if (args.sinks && live) row_total += power_of_2(args.sinks[head] * LOG2_E - peak[r] * scale);
      float share = row_total > 0.f ? 1.f / row_total : 0.f;
      T* to = static_cast<T*>(args.out) + (token * args.kv_heads * args.group + head) * DIM + lane % 4 * 8;
#pragma unroll
      for (int j = 0; j < DIM / 8; j += 4) {
        uint32_t words[4], transposed[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* pair_sums = &sums[4 * (j + i) + 2 * r];
          words[i] = pair<T>(pair_sums[0] * share, pair_sums[1] * share);
        }
        transpose(words, transposed);
        if (live)
          *reinterpret_cast<uint4*>(to + j * 8) =
              make_uint4(transposed[0], transposed[1], transposed[2], transposed[3]);
      }
    }
  }

  // Transposes a 4 x 4 matrix across four lanes: transposed[i] of lane l = words[l] of lane i.
  __device__ void transpose(const uint32_t (&words)[4], uint32_t (&transposed)[4]) const {
    int l = lane % 4;
    uint32_t swapped[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {  // lanes 0, 1 exchange two elements with lanes 2, 3
      uint32_t other = __shfl_xor_sync(ALL, l < 2 ? words[2 + i] : words[i], 2);
      swapped[i] = l < 2 ? words[i] : other;
      swapped[2 + i] = l < 2 ? other : words[2 + i];
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t other = __shfl_xor_sync(ALL, l % 2 ? swapped[i] : swapped[i + 1], 1);
      transposed[i] = l % 2 ? other : swapped[i];
      transposed[i + 1] = l % 2 ? swapped[i + 1] : other;
    }
  }

  __device__ void run() {
    scale = (CAP ? args.cap : args.scale) * LOG2_E;
    if (warpgroup == 1) named_barrier_arrive(1, CONSUMER_THREADS);  // warpgroup 0 is the first to use the tensor cores
    for (Ring<2> queries;; queries.next()) {
      wait_barrier(shared.query_full[queries.index], queries.parity);
      Tile tile = read_tile(shared.tiles[queries.index]);
      if (!tile.count) break;
      start(tile);
      attend(tile, shared.query[queries.index], shared.query_empty[queries.index]);
      write(tile);
    }
  }
};

}  // namespace
}  // namespace localllm::cuda
