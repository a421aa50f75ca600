// Decode attention at the speed of memory: keys and values go from memory to the registers of the tensor cores, with
// no shared memory and no barrier on the way. See kernels/triton/attention_decode.py for how rows are shared out among
// chunks, and merged; here a block is 64 positions, 16 for each of four warps, which meet at the end of a row.
//
// Scores are computed as S^T = K Q^T and answers as O^T = V^T P^T, so that the heads that share a kv head are the eight
// columns of m16n8k16 and nothing is wasted on padding. The order of the summed index is free, if both operands keep
// to it: lanes load 16 bytes of what they multiply themselves.
#include <algorithm>

#include "attention.h"
#include "overlap.cuh"

namespace localllm::cuda {
namespace {

constexpr int WARPS = 4, STEP = 16, BLOCK = WARPS * STEP;
#if __CUDA_ARCH__ == 800
constexpr int HELD = 2;  // blocks that a processor holds; here three would spill a register
#else
constexpr int HELD = 3;
#endif
constexpr int AHEAD = 16;  // parts that a merge reads at once
constexpr unsigned ALL = 0xffffffff;
constexpr float LOG2_E = 1.4426950408889634f;

__device__ int32_t arrivals[MOST_PAIRS];  // [rows, kv_heads]: parts that are done. Zero between calls

struct Row {
  int low, end, blocks;  // positions that are seen, and blocks of them
};

__device__ inline Row measured(const DecodeArgs& args, int row) {
  int queries = args.row_starts[row + 1] - args.row_starts[row], end = args.context_lens[row];
  int low = args.window > 0 ? max(end - args.window, 0) : 0;
  return {low, end, queries == 1 ? (end - low + BLOCK - 1) / BLOCK : 0};
}

// The row in which a block lies, and the blocks of those before it.
struct Place {
  int row, passed;
};

__device__ inline Place found(const DecodeArgs& args, int at, int lane) {
  int row = 0, passed = 0;
  for (int base = 0; base < args.rows; base += 32) {
    int upto = base + lane < args.rows ? measured(args, base + lane).blocks : 0;
    for (int distance = 1; distance < 32; distance *= 2) {
      int other = __shfl_up_sync(ALL, upto, distance);
      if (lane >= distance) upto += other;
    }
    int over = __popc(__ballot_sync(ALL, base + lane < args.rows && passed + upto <= at));
    row += over;
    if (over > 0) passed += __shfl_sync(ALL, upto, over - 1);
    if (over < 32) break;
  }
  return {row, passed};
}

__device__ inline uint4 fetch(const void* from, bool wanted) {
  uint4 got = make_uint4(0, 0, 0, 0);  // what lies beyond a context may be NaN
  if (wanted)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                 : "l"(from));
  return got;
}

template <class T>
__device__ inline void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1);
template <>
__device__ inline void multiply<__nv_bfloat16>(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply<__half>(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                        uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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

__device__ inline uint32_t transposed(uint32_t matrix) {  // 8 x 8 of 16 bits across the warp
  uint32_t other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(matrix));
  return other;
}

// Over the lanes that hold the same column.
__device__ inline float column_max(float x) {
  for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, distance));
  return x;
}
__device__ inline float column_sum(float x) {
  for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(ALL, x, distance);
  return x;
}

// What a warp knows of its part: of heads 2 t and 2 t + 1, t = lane % 4. acc holds 16 dims a tile; see Warp::attend.
template <class T, int D>
struct Warp {
  float acc[D / 16][4];
  float peak[2], total[2];
  uint4 key[2][D / 32], value[4][D / 64], query[D / 32];
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  __device__ void start(const T* from, bool there) {
    for (int j = 0; j < D / 32; j++) query[j] = fetch(from + j * 32 + t * 8, there);
    for (int i = 0; i < D / 16; i++)
      for (int c = 0; c < 4; c++) acc[i][c] = 0.f;
    peak[0] = peak[1] = -INFINITY;
    total[0] = total[1] = 0.f;
  }

  // Lane l's slot is that of position base + l % 16.
  __device__ void load_keys(const DecodeArgs& args, int64_t head, int slot, int base, int last) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int64_t at = head + __shfl_sync(ALL, slot, g + 8 * half) * args.slot + t * 8;
      const T* from = static_cast<const T*>(args.keys) + at;
#pragma unroll
      for (int j = 0; j < D / 32; j++) key[half][j] = fetch(from + j * 32, base + g + 8 * half < last);
    }
  }

  __device__ void load_values(const DecodeArgs& args, int64_t head, int slot, int base, int last) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int own = 2 * t + i % 2 + 8 * (i / 2);
      const T* from = static_cast<const T*>(args.values) + head + __shfl_sync(ALL, slot, own) * args.slot + g * 8;
#pragma unroll
      for (int v = 0; v < D / 64; v++) value[i][v] = fetch(from + v * 64, base + own < last);
    }
  }

  // Weights of positions base + g and base + g + 8 for two heads, as the second operand of the next product.
  __device__ void weigh(const DecodeArgs& args, int base, int last, uint32_t (&weights)[2]) {
    float scores[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      multiply<T>(scores, key[0][j].x, key[1][j].x, key[0][j].y, key[1][j].y, query[j].x, query[j].y);
      multiply<T>(scores, key[0][j].z, key[1][j].z, key[0][j].w, key[1][j].w, query[j].z, query[j].w);
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
      scores[h] = exp2f(scores[h] - higher), scores[2 + h] = exp2f(scores[2 + h] - higher);
      total[h] = total[h] * shrink + scores[h] + scores[2 + h];
#pragma unroll
      for (int i = 0; i < D / 16; i++) acc[i][h] *= shrink, acc[i][2 + h] *= shrink;
    }
    weights[0] = transposed(pair<T>(scores[0], scores[1]));
    weights[1] = transposed(pair<T>(scores[2], scores[3]));
  }

  // acc[v * 4 + e][c] is of dim v * 64 + g * 8 + 2 e + c / 2 and head 2 t + c % 2.
  __device__ void attend(const uint32_t (&weights)[2]) {
#pragma unroll
    for (int v = 0; v < D / 64; v++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          x[i] = e == 0 ? value[i][v].x : e == 1 ? value[i][v].y : e == 2 ? value[i][v].z : value[i][v].w;
        multiply<T>(acc[v * 4 + e], __byte_perm(x[0], x[1], 0x5410), __byte_perm(x[0], x[1], 0x7632),
                    __byte_perm(x[2], x[3], 0x5410), __byte_perm(x[2], x[3], 0x7632), weights[0], weights[1]);
      }
  }
};

template <int D>
struct Meeting {  // of the warps of a block
  float acc[WARPS][MOST_SHARING][D];
  float peak[WARPS][MOST_SHARING], total[WARPS][MOST_SHARING];
  int arrived;
};

template <class T, int D>
__device__ inline void finish(const DecodeArgs& args, int start, int head, const float (&sums)[D / 32], float peak,
                              float total, int lane) {
  if (args.sinks) total += exp2f(args.sinks[head] * LOG2_E - peak);
  T* out = static_cast<T*>(args.out) + (int64_t(start) * args.kv_heads * args.group + head) * D + lane * (D / 32);
#pragma unroll
  for (int i = 0; i < D / 32; i++) out[i] = T(sums[i] / total);
}

// One head of a row from its parts, by one warp.
template <class T, int D>
__device__ void merge(const DecodeArgs& args, int start, int kv_head, int own, int begun, int parts, int lane) {
  float peak = -INFINITY, total = 0.f, sums[D / 32] = {};
  auto place = [&](int part) {  // part 0 is of a row that begins in its chunk, the others of one that began before
    return ((int64_t(begun + part) * args.kv_heads + kv_head) * 2 + (part == 0)) * args.group + own;
  };
  auto part = [&](int number, bool there, float (&to)[D / 32]) {
    const float* from = args.partial + place(number) * D + lane * (D / 32);
#pragma unroll
    for (int i = 0; i < D / 32; i += 2) {
      float2 two = there ? __ldcg(reinterpret_cast<const float2*>(from + i)) : make_float2(0.f, 0.f);
      to[i] = two.x, to[i + 1] = two.y;
    }
  };
  auto add = [&](float weight, const float (&from)[D / 32]) {
#pragma unroll
    for (int i = 0; i < D / 32; i++) sums[i] += weight * from[i];
  };
  for (int base = 0; base < parts; base += 32) {
    int count = min(32, parts - base);
    float ahead[AHEAD][D / 32];  // on their way while the weights are found
#pragma unroll
    for (int p = 0; p < AHEAD; p++) part(base + p, p < count, ahead[p]);
    float2 stat = make_float2(-INFINITY, 0.f);
    if (lane < count) stat = __ldcg(reinterpret_cast<const float2*>(args.stats) + place(base + lane));
    float higher = stat.x;
    for (int distance = 1; distance < 32; distance *= 2) higher = fmaxf(higher, __shfl_xor_sync(ALL, higher, distance));
    higher = fmaxf(higher, peak);
    // 0 where there is no part
    float weight = exp2f(stat.x - higher), shrink = exp2f(peak - higher), sum = weight * stat.y;
    for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(ALL, sum, distance);
    total = total * shrink + sum;
    peak = higher;
#pragma unroll
    for (int i = 0; i < D / 32; i++) sums[i] *= shrink;
#pragma unroll
    for (int p = 0; p < AHEAD; p++) add(__shfl_sync(ALL, weight, p), ahead[p]);
#pragma unroll 8
    for (int p = AHEAD; p < count; p++) {
      float found[D / 32];
      part(base + p, true, found);
      add(__shfl_sync(ALL, weight, p), found);
    }
  }
  finish<T, D>(args, start, kv_head * args.group + own, sums, peak, total, lane);
}

template <class T, int D>
__global__ void __launch_bounds__(WARPS * 32, HELD) decode_kernel(const __grid_constant__ DecodeArgs args) {
  __shared__ Meeting<D> meeting;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_head = blockIdx.x % args.kv_heads, chunk = blockIdx.x / args.kv_heads;
  await_previous();
  let_next_begin();
  int every = 0;
  for (int row = lane; row < args.rows; row += 32) every += measured(args, row).blocks;
  every = __reduce_add_sync(ALL, every);
  const int share = max((every + args.chunks - 1) / args.chunks, 1);
  int at = chunk * share;
  const int stop = min(at + share, every);
  if (at >= stop) return;
  auto [row, passed] = found(args, at, lane);
  const int64_t head_at = kv_head * args.head;
  Warp<T, D> own;
  for (; at < stop; row++) {
    const Row seen = measured(args, row);
    const int upto = min(stop, passed + seen.blocks), start = args.row_starts[row];
    if (at < upto) {
      const int last = min(seen.low + (upto - passed) * BLOCK, seen.end);
      int base = seen.low + (at - passed) * BLOCK + warp * STEP;
      const int32_t* table = args.page_table + row * args.table_row;
      auto slot_of = [&](int position) {
        int page = position < last ? table[position >> args.page_shift] : 0;
        return (page << args.page_shift) + (position & ((1 << args.page_shift) - 1));
      };
      int slot = slot_of(base + lane % STEP), next = slot_of(base + BLOCK + lane % STEP);
      own.start(static_cast<const T*>(args.query) + start * args.query_token +
                    (kv_head * args.group + own.g) * args.query_head,
                own.g < args.group);
      own.load_keys(args, head_at, slot, base, last);
      own.load_values(args, head_at, slot, base, last);
      for (; base < last; base += BLOCK) {
        int after = slot_of(base + 2 * BLOCK + lane % STEP);
        uint32_t weights[2];
        own.weigh(args, base, last, weights);
        own.load_keys(args, head_at, next, base + BLOCK, last);
        own.attend(weights);
        own.load_values(args, head_at, next, base + BLOCK, last);
        next = after;
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int head = 2 * own.t + h;
        float total = column_sum(own.total[h]);
        if (own.g == 0) meeting.peak[warp][head] = own.peak[h], meeting.total[warp][head] = total;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
          *reinterpret_cast<float2*>(&meeting.acc[warp][head][(i / 4) * 64 + own.g * 8 + 2 * (i % 4)]) =
              make_float2(own.acc[i][h], own.acc[i][2 + h]);
      }
      __syncthreads();
      const int begun = passed / share, parts = (passed + seen.blocks - 1) / share - begun + 1;
      const int64_t place = (int64_t(chunk) * args.kv_heads + kv_head) * 2 + (begun == chunk);
      for (int head = warp; head < args.group; head += WARPS) {
        float peak = -INFINITY, total = 0.f, sums[D / 32] = {};
        for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, meeting.peak[w][head]);
        for (int w = 0; w < WARPS; w++) {
          float weight = exp2f(meeting.peak[w][head] - peak);
          total += weight * meeting.total[w][head];
#pragma unroll
          for (int i = 0; i < D / 32; i++) sums[i] += weight * meeting.acc[w][head][lane * (D / 32) + i];
        }
        if (parts == 1) {
          finish<T, D>(args, start, kv_head * args.group + head, sums, peak, total, lane);
          continue;
        }
        float* to = args.partial + (place * args.group + head) * D + lane * (D / 32);
#pragma unroll
        for (int i = 0; i < D / 32; i++) to[i] = sums[i];
        if (lane == 0) reinterpret_cast<float2*>(args.stats)[place * args.group + head] = make_float2(peak, total);
      }
      if (parts > 1) {
        int32_t* counter = arrivals + row * args.kv_heads + kv_head;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) meeting.arrived = atomicAdd(counter, 1);
        __syncthreads();
        if (meeting.arrived == parts - 1) {
          __threadfence();
          if (threadIdx.x == 0) *counter = 0;
          for (int head = warp; head < args.group; head += WARPS)
            merge<T, D>(args, start, kv_head, head, begun, parts, lane);
        }
      }
      __syncthreads();  // the meeting's memory is free for the next row
    }
    at = upto;
    passed += seen.blocks;
  }
}

}  // namespace

void decode(DecodeArgs args, cudaStream_t stream) {
  auto start = [&](auto kernel) {
    launch_early(kernel, int64_t(args.chunks) * args.kv_heads, WARPS * 32, 0, stream, args);
  };
  auto with = [&](auto zero) {
    using T = decltype(zero);
    args.dim == 64 ? start(decode_kernel<T, 64>) : start(decode_kernel<T, 128>);
  };
  args.type == Type::bf16 ? with(__nv_bfloat16{}) : with(__half{});
  check_launch("decode_attention");
}

int decode_chunks(int64_t kv_heads) {
  int held = gpu().major == 8 && gpu().minor == 0 ? 2 : 3;
  return int(std::max<int64_t>(1, gpu().processors * held / kv_heads));
}

}  // namespace localllm::cuda
