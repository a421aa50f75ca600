// Decode attention, bound by memory bandwidth: warps load keys and values from global memory directly into the
// registers of mma.sync, without shared memory and without barriers in the loop. kernels/triton/attention_decode.py
// describes how the contexts of all rows are divided into chunks and how the partial results of a row are merged. A
// thread block computes one chunk of one kv head, STEP positions per warp at a time; its warps combine their results at
// the end of each row. In this file, a "block" of a row is WARPS * STEP positions.
#include <algorithm>
#include <type_traits>

#include "decode_warp.cuh"

namespace localllm::cuda {
namespace {

// Warps per thread block. A batch of one row uses more warps if their partial results fit into shared memory, so that
// the row has fewer partial results to merge.
constexpr int BATCH_WARPS = 4;
constexpr int single_row_warps(int dim) { return dim <= 128 ? 8 : BATCH_WARPS; }
// Resident thread blocks per multiprocessor: with BATCH_WARPS warps the maximum without register spills. One block of
// more warps has the same registers per thread, so that blocks of the previous and next kernel fit beside it.
constexpr int resident_blocks(int dim, bool e4m3, int arch, int warps) {
  if (warps > BATCH_WARPS) return 1;
  if (dim > 128) return 2;
  return arch == 800 || (arch < 900 && e4m3 && dim == 128) ? 2 : 3;
}
// The bound on the threads of a block: it limits the registers of a block of more than BATCH_WARPS warps.
constexpr int max_threads(int dim, bool e4m3, int arch, int warps) {
  return (warps > BATCH_WARPS ? resident_blocks(dim, e4m3, arch, BATCH_WARPS) : 1) * BATCH_WARPS * 32;
}
#ifdef __CUDA_ARCH__
constexpr int ARCH = __CUDA_ARCH__;
#else
constexpr int ARCH = 0;
#endif
constexpr int MIN_BLOCKS = 2;  // minimum of blocks per chunk; with fewer, the merge costs more than it saves
// Partial results whose loads a merge starts before it uses them.
template <int D>
constexpr int PRELOADED = D <= 128 ? 16 : 8;

struct Row {
  int low, end, blocks;  // visible positions low … end - 1, and the number of blocks that they fill
};

template <int BLOCK>
__device__ inline Row row_of(const DecodeArgs& args, int row) {
  int queries = args.row_starts[row + 1] - args.row_starts[row], end = args.context_lens[row];
  int low = args.window > 0 ? max(end - args.window, 0) : 0;
  return {low, end, queries == 1 ? (end - low + BLOCK - 1) / BLOCK : 0};
}

// Counts one arrival and returns the count before it. The atomic add has acquire and release semantics: if block B
// arrives after block A, then after its next __syncthreads B sees all that A wrote before its __syncthreads.
__device__ inline int arrive(int32_t* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// The row of a block of positions, and the number of blocks of all rows before it.
struct RowLocation {
  int row, blocks_before;
};

template <int BLOCK>
__device__ inline RowLocation find_row(const DecodeArgs& args, int block, int lane) {
  int row = 0, blocks_before = 0;
  for (int base = 0; base < args.rows; base += 32) {
    int end = base + lane < args.rows ? row_of<BLOCK>(args, base + lane).blocks : 0;
    for (int distance = 1; distance < 32; distance *= 2) {
      int other = __shfl_up_sync(ALL, end, distance);
      if (lane >= distance) end += other;
    }
    int rows_before = __popc(__ballot_sync(ALL, base + lane < args.rows && blocks_before + end <= block));
    row += rows_before;
    if (rows_before > 0) blocks_before += __shfl_sync(ALL, end, rows_before - 1);
    if (rows_before < 32) break;
  }
  return {row, blocks_before};
}

// The blocks of positions that one chunk computes.
struct Work {
  int block, end_block, chunk_blocks;  // first block and end of the chunk; number of blocks per chunk
  int row, blocks_before;              // the row of the first block, and the number of blocks of all rows before it
};

template <int BLOCK>
__device__ inline Work find_work(const DecodeArgs& args, int chunk, int lane) {
  int all_blocks = 0;
  for (int row = lane; row < args.rows; row += 32) all_blocks += row_of<BLOCK>(args, row).blocks;
  all_blocks = __reduce_add_sync(ALL, all_blocks);
  const int chunk_blocks = max((all_blocks + args.chunks - 1) / args.chunks, MIN_BLOCKS);
  const int block = chunk * chunk_blocks;
  const RowLocation index_of = find_row<BLOCK>(args, block, lane);
  return {block, min(block + chunk_blocks, all_blocks), chunk_blocks, index_of.row, index_of.blocks_before};
}

// Prefetches the first keys and values of a chunk to L2. Rows and page tables may hold any values: indices are clamped.
template <int BLOCK, class T, int D, class C>
__device__ inline void prefetch_chunk(const DecodeArgs& args, const Work& work, Warp<T, D, C>& loader, int64_t head,
                                      int warp) {
  if (work.block >= work.end_block || work.row >= args.rows) return;
  const Row visible = row_of<BLOCK>(args, work.row);
  const int last = min(visible.end, args.columns << args.page_shift);
  for (int block = work.block; block < min(work.block + 2, work.end_block); block++) {
    const int base = visible.low + (block - work.blocks_before) * BLOCK + warp * STEP;
    const int position = base + loader.lane % STEP;
    if (position < 0 || position >= last) continue;
    const int page = args.page_table[work.row * args.table_row + (position >> args.page_shift)];
    const int slot = (min(max(page, 0), args.pages - 1) << args.page_shift) + position % (1 << args.page_shift);
    loader.prefetch(args, head, slot, base, last);
  }
}

// The dims of a lane when it merges partial results.
template <int D>
constexpr int LANE_DIMS = PADDED<D> / 32;

template <int D, int WARPS>
struct Partials {  // shared memory for the partial results of the warps of a thread block
  float acc[WARPS][MAX_GROUP][PADDED<D>];
  float peak[WARPS][MAX_GROUP], total[WARPS][MAX_GROUP];
  int arrived;
};

template <class T, int D>
__device__ inline void finish(const DecodeArgs& args, int start, int head, const float (&sums)[LANE_DIMS<D>],
                              float peak, float total, int lane) {
  if (args.sinks) total += exp2f(args.sinks[head] * LOG2_E - peak);
  T* out = static_cast<T*>(args.out) + (int64_t(start) * args.kv_heads * args.group + head) * D + lane * LANE_DIMS<D>;
  if (D != PADDED<D> && lane * LANE_DIMS<D> >= D) return;
#pragma unroll
  for (int i = 0; i < LANE_DIMS<D>; i++) out[i] = T(sums[i] / total);
}

// One warp merges the partial results of one query head of a row and writes the output.
template <class T, int D>
__device__ void merge(const DecodeArgs& args, int start, int kv_head, int group_head, int first_chunk, int chunk_count,
                      int lane) {
  float peak = -INFINITY, total = 0.f, sums[LANE_DIMS<D>] = {};
  // Index of a partial result of the row. A chunk has two: 1 for the row that begins in the chunk, else 0.
  auto index_of = [&](int chunk) {
    return ((int64_t(first_chunk + chunk) * args.kv_heads + kv_head) * 2 + (chunk == 0)) * args.group + group_head;
  };
  auto load_partial = [&](int chunk, bool valid, float (&to)[LANE_DIMS<D>]) {
    const float* from = args.partial + index_of(chunk) * PADDED<D> + lane * LANE_DIMS<D>;
#pragma unroll
    for (int i = 0; i < LANE_DIMS<D>; i += 2) {
      float2 two = valid ? __ldcg(reinterpret_cast<const float2*>(from + i)) : make_float2(0.f, 0.f);
      to[i] = two.x;
      to[i + 1] = two.y;
    }
  };
  auto add = [&](float weight, const float (&from)[LANE_DIMS<D>]) {
#pragma unroll
    for (int i = 0; i < LANE_DIMS<D>; i++) sums[i] += weight * from[i];
  };
  for (int base = 0; base < chunk_count; base += 32) {
    int count = min(32, chunk_count - base);
    float preloaded[PRELOADED<D>][LANE_DIMS<D>];  // loads in flight while the weights are computed
#pragma unroll
    for (int p = 0; p < PRELOADED<D>; p++) load_partial(base + p, p < count, preloaded[p]);
    float2 stat = make_float2(-INFINITY, 0.f);
    if (lane < count) stat = __ldcg(reinterpret_cast<const float2*>(args.stats) + index_of(base + lane));
    float higher = stat.x;
    for (int distance = 1; distance < 32; distance *= 2) higher = fmaxf(higher, __shfl_xor_sync(ALL, higher, distance));
    higher = fmaxf(higher, peak);
    // `weight` is 0 for lanes without a chunk.
    float weight = exp2f(stat.x - higher), shrink = exp2f(peak - higher), sum = weight * stat.y;
    for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(ALL, sum, distance);
    total = total * shrink + sum;
    peak = higher;
#pragma unroll
    for (int i = 0; i < LANE_DIMS<D>; i++) sums[i] *= shrink;
#pragma unroll
    for (int p = 0; p < PRELOADED<D>; p++) add(__shfl_sync(ALL, weight, p), preloaded[p]);
#pragma unroll 8
    for (int p = PRELOADED<D>; p < count; p++) {
      float values[LANE_DIMS<D>];
      load_partial(base + p, true, values);
      add(__shfl_sync(ALL, weight, p), values);
    }
  }
  finish<T, D>(args, start, kv_head * args.group + group_head, sums, peak, total, lane);
}

// Writes the partial result of one warp to shared memory.
template <class T, int D, class C, int WARPS>
__device__ __forceinline__ void write_partial(Partials<D, WARPS>& partials, const Warp<T, D, C>& state, int warp) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int head = 2 * state.t + h;
    float total = column_sum(state.total[h]);
    if (state.g == 0) {
      partials.peak[warp][head] = state.peak[h];
      partials.total[warp][head] = total;
    }
#pragma unroll
    for (int i = 0; i < PADDED<D> / 16; i++)
      *reinterpret_cast<float2*>(&partials.acc[warp][head][(i / 4) * 64 + state.g * 8 + 2 * (i % 4)]) =
          make_float2(state.acc[i][h], state.acc[i][2 + h]);
  }
}

// The blocks of one row and one kv head in one chunk.
struct RowChunk {
  int row, start, kv_head, chunk;  // start: index of the row's query
  int first_chunk, chunk_count;    // the chunks that have blocks of the row
};

// Combines the partial results of the warps. Writes the outputs if the row is in this chunk only, else the partial
// result of the chunk.
template <class T, int D, int WARPS>
__device__ __forceinline__ void combine_warps(const DecodeArgs& args, const RowChunk& row_chunk,
                                              const Partials<D, WARPS>& partials, int warp, int lane) {
  const int64_t partial_index =
      (int64_t(row_chunk.chunk) * args.kv_heads + row_chunk.kv_head) * 2 + (row_chunk.first_chunk == row_chunk.chunk);
  for (int head = warp; head < args.group; head += WARPS) {
    float peak = -INFINITY, total = 0.f, sums[LANE_DIMS<D>] = {};
    for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, partials.peak[w][head]);
    for (int w = 0; w < WARPS; w++) {
      float weight = exp2f(partials.peak[w][head] - peak);
      total += weight * partials.total[w][head];
#pragma unroll
      for (int i = 0; i < LANE_DIMS<D>; i++) sums[i] += weight * partials.acc[w][head][lane * LANE_DIMS<D> + i];
    }
    if (row_chunk.chunk_count == 1) {
      finish<T, D>(args, row_chunk.start, row_chunk.kv_head * args.group + head, sums, peak, total, lane);
      continue;
    }
    float* to = args.partial + (partial_index * args.group + head) * PADDED<D> + lane * LANE_DIMS<D>;
#pragma unroll
    for (int i = 0; i < LANE_DIMS<D>; i++) to[i] = sums[i];
    if (lane == 0) reinterpret_cast<float2*>(args.stats)[partial_index * args.group + head] = make_float2(peak, total);
  }
}

// The thread block that finishes a row last merges the partial results of all chunks of the row.
template <class T, int D, int WARPS>
__device__ __forceinline__ void merge_last(const DecodeArgs& args, const RowChunk& row_chunk,
                                           Partials<D, WARPS>& partials, int warp, int lane) {
  int32_t* counter = args.arrivals + row_chunk.row * args.kv_heads + row_chunk.kv_head;
  __syncthreads();
  if (threadIdx.x == 0) partials.arrived = arrive(counter);
  __syncthreads();
  if (partials.arrived != row_chunk.chunk_count - 1) return;
  if (threadIdx.x == 0) *counter = 0;
  for (int head = warp; head < args.group; head += WARPS)
    merge<T, D>(args, row_chunk.start, row_chunk.kv_head, head, row_chunk.first_chunk, row_chunk.chunk_count, lane);
}

template <class T, int D, class C, int WARPS>
__global__ void __launch_bounds__(max_threads(D, sizeof(C) == 1, ARCH, WARPS),
                                  resident_blocks(D, sizeof(C) == 1, ARCH, WARPS))
    decode_kernel(const __grid_constant__ DecodeArgs args) {
  constexpr int BLOCK = WARPS * STEP;
  __shared__ Partials<D, WARPS> partials;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_head = blockIdx.x % args.kv_heads, chunk = blockIdx.x / args.kv_heads;
  const int64_t head_offset = kv_head * args.head;
  __shared__ uint4 shared_query[Warp<T, D, C>::QUERY_WORDS];
  Warp<T, D, C> state;
  state.shared_query = shared_query;
  // An earlier kernel may still write rows and page tables. Before wait_for_previous their values only serve as
  // prefetch hints.
  if constexpr (ARCH >= 900) prefetch_chunk<BLOCK>(args, find_work<BLOCK>(args, chunk, lane), state, head_offset, warp);
  wait_for_previous();
  launch_dependents();
  auto [block, end_block, chunk_blocks, row, blocks_before] = find_work<BLOCK>(args, chunk, lane);
  for (; block < end_block; row++) {
    const Row visible = row_of<BLOCK>(args, row);
    const int end = min(end_block, blocks_before + visible.blocks), start = args.row_starts[row];
    if (block < end) {
      const int last = min(visible.low + (end - blocks_before) * BLOCK, visible.end);
      int base = visible.low + (block - blocks_before) * BLOCK + warp * STEP;
      const int32_t* table = args.page_table + row * args.table_row;
      auto slot_of = [&](int position) {
        int page = position < last ? table[position >> args.page_shift] : 0;
        return (page << args.page_shift) + (position & ((1 << args.page_shift) - 1));
      };
      int slot = slot_of(base + lane % STEP), next = slot_of(base + BLOCK + lane % STEP);
      state.start();
      state.load_query(static_cast<const T*>(args.query) + start * args.query_token +
                           (kv_head * args.group + state.g) * args.query_head,
                       state.g < args.group, warp);
      state.load_keys(args, head_offset, slot, base, last);
      state.load_values(args, head_offset, slot, base, last);
      for (; base < last; base += BLOCK) {
        int after = slot_of(base + 2 * BLOCK + lane % STEP);
        uint32_t weights[2];
        state.softmax(args, base, last, weights);
        state.load_keys(args, head_offset, next, base + BLOCK, last);
        state.attend(weights);
        state.load_values(args, head_offset, next, base + BLOCK, last);
        next = after;
      }
      write_partial(partials, state, warp);
      __syncthreads();
      const int first_chunk = blocks_before / chunk_blocks;
      const int last_chunk = (blocks_before + visible.blocks - 1) / chunk_blocks;
      const RowChunk row_chunk{row, start, kv_head, chunk, first_chunk, last_chunk - first_chunk + 1};
      combine_warps<T>(args, row_chunk, partials, warp, lane);
      if (row_chunk.chunk_count > 1) merge_last<T>(args, row_chunk, partials, warp, lane);
      __syncthreads();  // `partials` may be overwritten for the next row
    }
    block = end;
    blocks_before += visible.blocks;
  }
}

}  // namespace

void decode(DecodeArgs args, cudaStream_t stream) {
  auto start = [&](auto kernel, int warps) {
    launch_early(kernel, int64_t(args.chunks) * args.kv_heads, warps * 32, 0, stream, args);
  };
  auto with_warps = [&](auto zero, auto cached, auto dim) {
    using T = decltype(zero);
    using C = decltype(cached);
    constexpr int D = decltype(dim)::value;
    constexpr int SINGLE = single_row_warps(D);
    args.rows == 1 ? start(decode_kernel<T, D, C, SINGLE>, SINGLE)
                   : start(decode_kernel<T, D, C, BATCH_WARPS>, BATCH_WARPS);
  };
  auto of = [&](auto zero, auto cached) {
    switch (args.dim) {
      case 64: return with_warps(zero, cached, std::integral_constant<int, 64>{});
      case 80: return with_warps(zero, cached, std::integral_constant<int, 80>{});
      case 96: return with_warps(zero, cached, std::integral_constant<int, 96>{});
      case 128: return with_warps(zero, cached, std::integral_constant<int, 128>{});
      case 192: return with_warps(zero, cached, std::integral_constant<int, 192>{});
      case 256: return with_warps(zero, cached, std::integral_constant<int, 256>{});
    }
  };
  auto with = [&](auto zero) { args.e4m3 ? of(zero, __nv_fp8_e4m3{}) : of(zero, zero); };
  args.type == Type::bf16 ? with(__nv_bfloat16{}) : with(__half{});
  check_launch("decode_attention");
}

int decode_chunks(int64_t rows, int64_t kv_heads, int dim, bool e4m3) {
  int warps = rows == 1 ? single_row_warps(dim) : BATCH_WARPS;
  int resident = resident_blocks(dim, e4m3, gpu().major * 100 + gpu().minor * 10, warps);
  return int(std::max<int64_t>(1, gpu().processors * resident / kv_heads));
}

}  // namespace localllm::cuda
