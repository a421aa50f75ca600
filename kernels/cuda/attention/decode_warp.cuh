// Decode attention of one warp: scores and weighted values of 16 positions at a time.
//
// Scores are computed as S^T = K Q^T and outputs as O^T = V^T P^T with mma.sync.m16n8k16. The query heads of a kv head
// (up to 8) are the columns, so no row of the mma is padding. Both operands use the same permutation of the reduction
// index, so each lane loads 16 contiguous bytes.
#pragma once

#include "decode.h"
#include "mma.cuh"

namespace localllm::cuda {
namespace {

constexpr int STEP = 16;  // positions per iteration of a warp

__device__ inline uint4 fetch(const void* from, bool valid) {
  uint4 data = make_uint4(0, 0, 0, 0);  // memory after the end of the context may hold NaN
  if (valid)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
                 : "l"(from));
  return data;
}

__device__ inline uint2 fetch_half(const void* from, bool valid) {
  uint2 data = make_uint2(0, 0);
  if (valid)
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(data.x), "=r"(data.y) : "l"(from));
  return data;
}

// Loads 8 contiguous elements of the cache and converts them for mma.sync: float8_e4m3 to float16, which is exact.
template <class C>
struct Eight {
  using Loaded = uint4;
  static __device__ inline uint4 load(const C* from, bool valid) { return fetch(from, valid); }
  static __device__ inline uint4 widen(uint4 loaded) { return loaded; }
};
template <>
struct Eight<__nv_fp8_e4m3> {
  using Loaded = uint2;
  static __device__ inline uint2 load(const __nv_fp8_e4m3* from, bool valid) { return fetch_half(from, valid); }
  static __device__ inline uint4 widen(uint2 loaded) {
    return make_uint4(widen_two(loaded.x & 0xffff), widen_two(loaded.x >> 16), widen_two(loaded.y & 0xffff),
                      widen_two(loaded.y >> 16));
  }
};

__device__ inline uint32_t transposed(uint32_t matrix) {  // an 8 x 8 matrix of 16-bit values
  uint32_t other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(matrix));
  return other;
}

// Reductions over the 8 lanes with the same t = lane % 4, which have the same columns.
__device__ inline float column_max(float x) {
  for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, distance));
  return x;
}
__device__ inline float column_sum(float x) {
  for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(ALL, x, distance);
  return x;
}

// Online softmax of one warp over its positions. A lane holds heads 2 t and 2 t + 1, t = lane % 4. acc[i] is an mma
// tile of 16 dims (layout: see attend). T: type of queries and outputs; C: type of the cache, T or e4m3. Dims from D on
// are zeros: the head size is padded to a multiple of 32 for keys and of 64 for values.
template <class T, int D, class C = T>
struct Warp {
  static constexpr int KEYS = (D + 31) / 32, VALUES = PADDED<D> / 64;
  using H = typename Operand<C>::Type;
  float acc[VALUES * 4][4];
  float peak[2], total[2];
  typename Eight<C>::Loaded key[2][KEYS], value[4][VALUES];
  // The query of a large head would need too many registers. All warps of a thread block read it from shared memory.
  static constexpr bool SHARED_QUERY = D > 128;
  static constexpr int QUERY_WORDS = SHARED_QUERY ? KEYS * 32 : 1;
  uint4 query[SHARED_QUERY ? 1 : KEYS];
  uint4* shared_query;  // [QUERY_WORDS]
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  __device__ static bool inside(int dim) { return D == PADDED<D> || dim < D; }
  // All threads of the block call it. Later calls of `query_of` return dims 32 j + 8 t to 32 j + 8 t + 7 of head g.
  __device__ void load_query(const T* from, bool valid, int warp) {
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      if (SHARED_QUERY && warp > 0) break;
      const uint4 eight = convert_query<T, H>(fetch(from + j * 32 + t * 8, valid && inside(j * 32 + t * 8)));
      if constexpr (SHARED_QUERY) shared_query[j * 32 + lane] = eight;
      else query[j] = eight;
    }
    if constexpr (SHARED_QUERY) __syncthreads();
  }
  __device__ uint4 query_of(int j) const {
    if constexpr (SHARED_QUERY) return shared_query[j * 32 + lane];
    else return query[j];
  }
  __device__ void start() {
    for (int i = 0; i < VALUES * 4; i++)
      for (int c = 0; c < 4; c++) acc[i][c] = 0.f;
    peak[0] = peak[1] = -INFINITY;
    total[0] = total[1] = 0.f;
  }

  // Prefetches to L2 the positions that load_keys and load_values will read.
  __device__ void prefetch(const DecodeArgs& args, int64_t head, int slot, int base, int last) {
    constexpr int LINE = 128 / sizeof(C);  // elements per cache line
    if (base + lane % STEP >= last || lane / STEP * LINE >= D) return;
    int64_t offset = head + int64_t(slot) * args.slot + lane / STEP * LINE;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const C*>(args.keys) + offset));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const C*>(args.values) + offset));
  }

  // `slot` of lane l is the slot of position base + l % 16. Positions from `last` on become zeros.
  __device__ void load_keys(const DecodeArgs& args, int64_t head, int slot, int base, int last) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int64_t offset = head + __shfl_sync(ALL, slot, g + 8 * half) * args.slot + t * 8;
      const C* from = static_cast<const C*>(args.keys) + offset;
#pragma unroll
      for (int j = 0; j < KEYS; j++)
        key[half][j] = Eight<C>::load(from + j * 32, base + g + 8 * half < last && inside(j * 32 + t * 8));
    }
  }

  __device__ void load_values(const DecodeArgs& args, int64_t head, int slot, int base, int last) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int position = 2 * t + i % 2 + 8 * (i / 2);
      const C* from = static_cast<const C*>(args.values) + head + __shfl_sync(ALL, slot, position) * args.slot + g * 8;
#pragma unroll
      for (int v = 0; v < VALUES; v++)
        value[i][v] = Eight<C>::load(from + v * 64, base + position < last && inside(v * 64 + g * 8));
    }
  }

  // Scores and online softmax of 16 positions. Returns the weights of positions base + g and base + g + 8 for two heads
  // in the layout of operand B of mma.sync.
  __device__ void softmax(const DecodeArgs& args, int base, int last, uint32_t (&weights)[2]) {
    float scores[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
      uint4 low = Eight<C>::widen(key[0][j]), high = Eight<C>::widen(key[1][j]), eight = query_of(j);
      multiply<H>(scores, low.x, high.x, low.y, high.y, eight.x, eight.y);
      multiply<H>(scores, low.z, high.z, low.w, high.w, eight.z, eight.w);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float score = scores[c] * args.scale;
      if (args.cap > 0.f) score = tanhf(score / args.cap) * args.cap;
      scores[c] = base + g + 8 * (c / 2) < last ? score * LOG2_E : -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float higher = fmaxf(peak[h], column_max(fmaxf(scores[h], scores[2 + h])));
      float shrink = exp2f(peak[h] - higher);
      peak[h] = higher;
      scores[h] = exp2f(scores[h] - higher);
      scores[2 + h] = exp2f(scores[2 + h] - higher);
      total[h] = total[h] * shrink + scores[h] + scores[2 + h];
#pragma unroll
      for (int i = 0; i < VALUES * 4; i++) acc[i][h] *= shrink, acc[i][2 + h] *= shrink;
    }
    weights[0] = transposed(pair<H>(scores[0], scores[1]));
    weights[1] = transposed(pair<H>(scores[2], scores[3]));
  }

  // Adds the weighted values: acc[v * 4 + e][c] has dim v * 64 + g * 8 + 2 e + c / 2 and head 2 t + c % 2.
  __device__ void attend(const uint32_t (&weights)[2]) {
#pragma unroll
    for (int v = 0; v < VALUES; v++) {
      uint4 wide[4];
#pragma unroll
      for (int i = 0; i < 4; i++) wide[i] = Eight<C>::widen(value[i][v]);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = e == 0 ? wide[i].x : e == 1 ? wide[i].y : e == 2 ? wide[i].z : wide[i].w;
        multiply<H>(acc[v * 4 + e], __byte_perm(x[0], x[1], 0x5410), __byte_perm(x[0], x[1], 0x7632),
                    __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[2], x[3], 0x7632), weights[0], weights[1]);
      }
    }
  }
};

}  // namespace
}  // namespace localllm::cuda
