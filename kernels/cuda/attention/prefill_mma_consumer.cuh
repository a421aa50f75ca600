// Prefill attention with mma.sync: scores, softmax and weighted values of a warp, and the outputs.
#pragma once

#include "prefill_mma_copies.cuh"

namespace localllm::cuda {
namespace {

__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ inline void load_transposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

__device__ inline float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Reductions over the 4 lanes that hold one row of a matrix.
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL, x, 2));
}
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(ALL, x, 1);
  return x + __shfl_xor_sync(ALL, x, 2);
}

// The rows of a tile that a warp computes. A thread holds columns 2 * (lane % 4) and + 1 of each 8 columns, for rows
// lane / 4 + 8 r of each matrix.
template <class S, class T, class C>
struct Consumer {
  using H = typename Operand<C>::Type;
  const PrefillArgs& args;
  Shared<S, C>& shared;
  const Tile& tile;
  float multiplier = args.cap > 0.f ? LOG2_E : args.scale * LOG2_E;  // of scores, for exp2
  float scores[S::MATRICES][S::BLOCK / 8][4], sums[S::MATRICES][S::DIM / 8][4];
  float peak[S::MATRICES][2], total[S::MATRICES][2];

  // `thread`: its index; the warp's first row is thread / 32 * WARP_ROWS.
  static __device__ int tile_row(int thread, int matrix, int r) {
    return thread / 32 * S::WARP_ROWS + matrix * 16 + thread % 32 / 4 + 8 * r;
  }

  __device__ void start() {
#pragma unroll
    for (int m = 0; m < S::MATRICES; m++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        peak[m][r] = -INFINITY;
        total[m][r] = 0.f;
      }
#pragma unroll
      for (int d = 0; d < S::DIM / 8; d++)
#pragma unroll
        for (float& sum : sums[m][d]) sum = 0.f;
    }
  }

  // Copies the queries of the warp to shared memory. Rows without a query become zeros.
  __device__ void load_query() const {
    constexpr int GROUPS = S::DIM / 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const T* from = static_cast<const T*>(args.query) + tile.token * args.query_token +
                    int64_t(tile.kv_head) * args.group * args.query_head;
    for (int index = lane; index < S::WARP_ROWS * GROUPS; index += 32) {
      const int row = warp * S::WARP_ROWS + index / GROUPS, eight = index % GROUPS, query = row / args.group;
      const T* eight_from = from + query * args.query_token + row % args.group * args.query_head + eight * 8;
      H* to = shared.query + Swizzle<S::DIM>::offset(row, eight);
      if constexpr (std::is_same_v<T, H>) {
        copy_async(shared_address(to), query < tile.count ? eight_from : from, query < tile.count);
      } else {
        uint4 loaded = make_uint4(0, 0, 0, 0);
        if (query < tile.count) loaded = *reinterpret_cast<const uint4*>(eight_from);
        *reinterpret_cast<uint4*>(to) = convert_query<T, H>(loaded);
      }
    }
  }

  __device__ void multiply_keys() {
    const int thread = thread_index<S>(), lane = thread % 32;
    const Lane<S::DIM> query_lane(shared.query, thread / 32 * S::WARP_ROWS + lane % 16, lane / 16);
    const Lane<S::DIM> key_lane(shared.keys, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < S::MATRICES; m++)
#pragma unroll
      for (int n = 0; n < S::BLOCK / 8; n++)
#pragma unroll
        for (float& score : scores[m][n]) score = 0.f;
#pragma unroll
    for (int k = 0; k < S::DIM / 16; k++) {
      uint32_t query[S::MATRICES][4];
#pragma unroll
      for (int m = 0; m < S::MATRICES; m++) {
        load_matrices(query[m], query_lane.address(m * 16, k));
      }
#pragma unroll
      for (int n = 0; n < S::BLOCK / 16; n++) {
        uint32_t key[4];
        load_matrices(key, key_lane.address(n * 16, k));
#pragma unroll
        for (int m = 0; m < S::MATRICES; m++) {
          auto& q = query[m];
          multiply<H>(scores[m][2 * n], q[0], q[1], q[2], q[3], key[0], key[1]);
          multiply<H>(scores[m][2 * n + 1], q[0], q[1], q[2], q[3], key[2], key[3]);
        }
      }
    }
  }

  __device__ void cap_scores() {
    const float inner = 2.f * LOG2_E * args.scale / args.cap;
#pragma unroll
    for (auto& matrix : scores)
#pragma unroll
      for (auto& column : matrix)
#pragma unroll
        for (float& score : column)  // tanh x = 1 - 2 / (exp(2 x) + 1)
          score = args.cap - __fdividef(2.f * args.cap, power_of_2(score * inner) + 1.f);
  }

  // The scores of positions that the query of a row does not see become -inf.
  __device__ void mask(int block) {
    const int thread = thread_index<S>();
#pragma unroll
    for (int m = 0; m < S::MATRICES; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int visible = tile.before + min(tile_row(thread, m, r) / args.group, tile.count - 1);
        const int last = visible - block * S::BLOCK - 2 * (thread % 4);
        const int first = args.window > 0 ? last - args.window : -S::BLOCK;
#pragma unroll
        for (int i = 0; i < S::BLOCK / 4; i++) {
          const int position = i / 2 * 8 + i % 2;
          float& score = scores[m][i / 2][2 * r + i % 2];
          score = position <= last && position > first ? score : -INFINITY;
        }
      }
  }

  __device__ void softmax() {
#pragma unroll
    for (int m = 0; m < S::MATRICES; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float higher = peak[m][r];
#pragma unroll
        for (auto& column : scores[m]) higher = fmaxf(higher, fmaxf(column[2 * r], column[2 * r + 1]));
        higher = row_max(higher);
        const float level = higher == -INFINITY ? 0.f : higher * multiplier;
        const float shrink = power_of_2(peak[m][r] * multiplier - level);
        float sum = 0.f;
#pragma unroll
        for (auto& column : scores[m])
#pragma unroll
          for (int c = 2 * r; c < 2 * r + 2; c++) {
            column[c] = power_of_2(column[c] * multiplier - level);
            sum += column[c];
          }
        peak[m][r] = higher;
        total[m][r] = total[m][r] * shrink + sum;
#pragma unroll
        for (auto& column : sums[m]) {
          column[2 * r] *= shrink;
          column[2 * r + 1] *= shrink;
        }
      }
  }

  __device__ void multiply_values() {
    const int lane = thread_index<S>() % 32;
    const Lane<S::DIM> value_lane(shared.values, lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < S::BLOCK / 16; k++) {
      uint32_t weights[S::MATRICES][4];
#pragma unroll
      for (int m = 0; m < S::MATRICES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float(&column)[4] = scores[m][2 * k + i / 2];
          weights[m][i] = pair<H>(column[i % 2 * 2], column[i % 2 * 2 + 1]);
        }
#pragma unroll
      for (int d = 0; d < S::DIM / 16; d++) {
        uint32_t value[4];
        load_transposed(value, value_lane.address(k * 16, d));
#pragma unroll
        for (int m = 0; m < S::MATRICES; m++) {
          auto& w = weights[m];
          multiply<H>(sums[m][2 * d], w[0], w[1], w[2], w[3], value[0], value[1]);
          multiply<H>(sums[m][2 * d + 1], w[0], w[1], w[2], w[3], value[2], value[3]);
        }
      }
    }
  }

  // Writes the outputs through the shared memory of the warp's queries.
  __device__ void finish() {
    const int thread = thread_index<S>(), warp = thread / 32, lane = thread % 32;
    T* staged = reinterpret_cast<T*>(shared.query);
    __syncwarp();  // the lanes have read the queries
#pragma unroll
    for (int m = 0; m < S::MATRICES; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = tile_row(thread, m, r);
        float sum = row_sum(total[m][r]);
        if (args.sinks) {
          const float sink = args.sinks[tile.kv_head * args.group + row % args.group];
          sum += power_of_2(sink * LOG2_E - peak[m][r] * multiplier);
        }
        const float scale = 1.f / sum;
#pragma unroll
        for (int d = 0; d < S::DIM / 8; d++)
          *reinterpret_cast<uint32_t*>(staged + Swizzle<S::DIM>::offset(row, d) + lane % 4 * 2) =
              pair<T>(sums[m][d][2 * r] * scale, sums[m][d][2 * r + 1] * scale);
      }
    __syncwarp();
    constexpr int GROUPS = S::DIM / 8;
    T* out = static_cast<T*>(args.out) + int64_t(tile.token) * args.kv_heads * args.group * S::DIM;
    for (int index = lane; index < S::WARP_ROWS * GROUPS; index += 32) {
      const int row = warp * S::WARP_ROWS + index / GROUPS, eight = index % GROUPS, query = row / args.group;
      if (query >= tile.count) continue;
      const int64_t head = int64_t(query * args.kv_heads + tile.kv_head) * args.group + row % args.group;
      *reinterpret_cast<uint4*>(out + head * S::DIM + eight * 8) =
          *reinterpret_cast<const uint4*>(staged + Swizzle<S::DIM>::offset(row, eight));
    }
  }
};

}  // namespace
}  // namespace localllm::cuda
