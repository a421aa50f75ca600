// Products of 17 rows and more on tensor cores (mma.sync), for quantised weights; sm_80 and later.
//
// A tile is ROWS rows times OUTPUTS outputs. The reduction runs in chunks of 128 inputs. Thread block b of G computes
// the tiles b, b + G, … as long as all blocks have one. The iterations (tile, chunk) of the remaining tiles form a
// sequence, and each block computes an equal share of it (stream-K: Osama et al., 2023):
//
//   block 0: [tile 0: chunks 0 … 31][tile 1: chunks 0 … 9]   block 1: [tile 1: chunks 10 … 31][tile 2: …]
//
// A block that computes a part of a tile writes its sums to memory. The block that arrives last adds all parts in the
// order of the chunks, so the result depends on the shape and the number of blocks, but not on their timing.
//
// Chunks come through a ring buffer in shared memory by cp.async, across the ends of tiles. Weights are prefetched
// before the previous kernel has ended.
#pragma once

#include <type_traits>

#include "../../device/overlap.cuh"
#include "formats.cuh"

namespace localllm::cuda {

struct Tiled {
  void* out;                 // [rows, out_features]
  const void* x;             // [rows, x_stride]: bf16, or int8 from round_rows.cu, padded to chunks
  const uint8_t* weight;     // [out_features, row_bytes]
  const uint32_t* records;   // [out_features / 8][subgroups][8] (small_batch/formats.cuh); null: none
  const float* scale;        // [out_features]; null: none
  const float* row_scale;    // int8: [rows]; int4: [subgroups][row_pitch]; null: none
  const void* bias;          // [out_features]; null: none
  Type out_type, bias_type;
  int rows, out_features, in_features;
  int subgroups, records_per_subgroup;  // scales per output; records of a chunk with the same scale (fp8)
  int row_pitch;                       // a multiple of 4
  int64_t row_bytes, x_stride, out_stride;
  bool resident;       // true: no earlier kernel in the stream writes the weights
  int chunks, row_tiles, tiles;
  int sharers;         // blocks that share the tiles of the last wave
  int split;           // blocks of a cluster, which share a tile; 1: no clusters
  float* partials;     // [2 * sharers][OUTPUTS * ROWS], sums of parts of tiles
  int32_t* arrivals;   // [sharers] zeros; zero again after the kernel
};

// A warp computes M times 16 rows and N times 8 outputs. SLOTS: slots of the ring buffer.
template <class F, int M_, int N_, int WARPS_M_, int WARPS_N, int SLOTS_>
struct TileShape {
  using Format = F;
  static constexpr int M = M_, N = N_, WARPS_M = WARPS_M_, SLOTS = SLOTS_;
  static constexpr int ROWS = 16 * M * WARPS_M, OUTPUTS = 8 * N * WARPS_N, THREADS = 32 * WARPS_M * WARPS_N;
  static constexpr int X_ROW = 128 * F::X_BYTES;
  // Offsets in a slot of the ring.
  static constexpr int WEIGHT = ROWS * X_ROW, RECORDS = WEIGHT + OUTPUTS * F::WEIGHT_BYTES;
  static constexpr int ROW_SCALES = RECORDS + OUTPUTS * F::RECORDS * 4;
  static constexpr int SLOT = ROW_SCALES + (F::ROUNDED_IN_GROUPS ? ROWS * F::RECORDS * 4 : 0);
  static constexpr int SHARED = SLOTS * SLOT;     // bytes of shared memory
  static constexpr int PARTIAL = ROWS * OUTPUTS;  // sums of a tile

  static __device__ void sync() { __syncthreads(); }
};

// Copies 16 bytes, or writes zeros.
static __device__ inline void copy_16(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}

// A tile and chunk. `wave`: tiles that the block has completed.
struct Iteration {
  int tile, chunk, wave;
};

// The iterations of this thread block.
struct Schedule {
  const Tiled& a;
  int waves;         // tiles that every block computes alone
  int first, total;  // the remaining tiles: the first one, and their iterations; a.sharers blocks share them

  __device__ explicit Schedule(const Tiled& a)
      : a(a), waves(a.tiles / int(gridDim.x)), first(waves * int(gridDim.x)), total((a.tiles - first) * a.chunks) {}
  // The first iteration of the remaining tiles that a block computes.
  __device__ int begin(int index) const { return min(index, a.sharers) * unsigned(total) / a.sharers; }
  __device__ int block_of(int iteration) const { return ((iteration + 1) * unsigned(a.sharers) - 1) / total; }
  __device__ int count() const { return waves * a.chunks + begin(blockIdx.x + 1) - begin(blockIdx.x); }
  __device__ Iteration share(int wave) const {
    const int iteration = begin(blockIdx.x);
    return {first + iteration / a.chunks, iteration % a.chunks, wave};
  }
  __device__ Iteration start() const { return waves ? Iteration{int(blockIdx.x), 0, 0} : share(0); }
  // True if the next iteration has another tile.
  __device__ bool advance(Iteration& at) const {
    if (++at.chunk < a.chunks) return false;
    at.wave++;
    if (at.wave == waves) {
      at = share(at.wave);
      return true;
    }
    at.chunk = 0;
    at.tile += at.wave < waves ? int(gridDim.x) : 1;
    return true;
  }
  // The first and the last block that compute parts of a tile.
  __device__ int2 blocks_of(int tile) const {
    if (tile < first) return {0, 0};
    const int iteration = (tile - first) * a.chunks;
    return {block_of(iteration), block_of(iteration + a.chunks - 1)};
  }
};

// Copies of rows of 16-byte units from memory to a slot. Each thread copies the same unit of every STEP-th row.
template <int ROWS, int UNITS, int THREADS>
struct RowCopy {
  static constexpr int STEP = THREADS / UNITS, COUNT = (ROWS + STEP - 1) / STEP;
  static_assert(THREADS % UNITS == 0 && STEP % 8 == 0, "the permutation of units repeats every 8 rows");
  const char* from;  // this thread's unit of its first row, in chunk 0
  int rows;          // rows from this thread's first row to the last one
  int to;            // offset of this thread's unit in the slot

  // `pitch`: bytes from row to row. `inside`: the unit has inputs.
  __device__ void start(uint32_t slot, int64_t offset, int64_t pitch, bool inside) const {
    const char* source = from + offset;
    const int limit = inside ? rows : 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (ROWS % STEP == 0 || int(threadIdx.x) / UNITS + i * STEP < ROWS)
        copy_16(slot + to + i * STEP * UNITS * 16, source, i * STEP < limit);
      source += STEP * pitch;
    }
  }
};

// The copies of a thread for the tile that is fetched next.
template <class S>
struct TileCopy {
  using F = typename S::Format;
  static constexpr int X_UNITS = S::X_ROW / 16, WEIGHT_UNITS = F::WEIGHT_BYTES / 16;
  const Tiled& a;
  const Schedule& schedule;
  uint32_t ring;
  Iteration next;  // the iteration whose copy starts next
  RowCopy<S::ROWS, X_UNITS, S::THREADS> x;
  RowCopy<S::OUTPUTS, WEIGHT_UNITS, S::THREADS> weight;

  __device__ TileCopy(const Tiled& a, const Schedule& schedule, const void* memory)
      : a(a), schedule(schedule), ring(uint32_t(__cvta_generic_to_shared(memory))) {
    set(schedule.start());
  }
  __device__ void set(const Iteration& iteration) {
    next = iteration;
    set_tile();
  }
  __device__ void set_tile() {
    const int x_row = threadIdx.x / X_UNITS, x_unit = threadIdx.x % X_UNITS;
    const int row = next.tile % a.row_tiles * S::ROWS + x_row;
    x.from = static_cast<const char*>(a.x) + row * x_pitch() + x_unit * 16;
    x.rows = a.rows - row;
    x.to = x_row * S::X_ROW + F::x_unit(x_row, x_unit) * 16;
    const int weight_row = threadIdx.x / WEIGHT_UNITS, weight_unit = threadIdx.x % WEIGHT_UNITS;
    const int output = next.tile / a.row_tiles * S::OUTPUTS + weight_row;
    weight.from = reinterpret_cast<const char*>(a.weight) + output * a.row_bytes + weight_unit * 16;
    weight.rows = a.out_features - output;
    weight.to = S::WEIGHT + weight_row * F::WEIGHT_BYTES + F::weight_unit(weight_row, weight_unit) * 16;
  }
  __device__ int64_t x_pitch() const { return a.x_stride * F::X_BYTES; }
  __device__ void advance() {
    if (schedule.advance(next)) set_tile();
  }
  __device__ void start_weights(int index) const {
    const uint32_t slot = ring + index * S::SLOT;
    const int64_t offset = int64_t(next.chunk) * F::WEIGHT_BYTES;
    weight.start(slot, offset, a.row_bytes, offset + threadIdx.x % WEIGHT_UNITS * 16 < a.row_bytes);
    if constexpr (F::RECORDS > 0) start_records(slot + S::RECORDS);
  }
  __device__ void start_records(uint32_t to) const {
    constexpr int UNITS = S::OUTPUTS / 8 * F::RECORDS * 2;  // units of 4 outputs
    const int first_block = next.tile / a.row_tiles * (S::OUTPUTS / 8), blocks = (a.out_features + 7) / 8;
#pragma unroll
    for (int first = 0; first < UNITS; first += S::THREADS) {
      const int i = first + threadIdx.x;
      if (i >= UNITS) continue;
      const int block = first_block + i / (2 * F::RECORDS), record = next.chunk * F::RECORDS + i / 2 % F::RECORDS;
      const int subgroup = F::WEIGHT_BYTES == 64 ? record : record / a.records_per_subgroup;
      copy_16(to + i * 16, a.records + (int64_t(block) * a.subgroups + subgroup) * 8 + i % 2 * 4,
              block < blocks && subgroup < a.subgroups);
    }
  }
  __device__ void start_rows(int index) const {
    const uint32_t slot = ring + index * S::SLOT;
    const int64_t offset = int64_t(next.chunk) * S::X_ROW;
    const int input = next.chunk * 128 + threadIdx.x % X_UNITS * (16 / F::X_BYTES);
    x.start(slot, offset, x_pitch(), F::ROUNDED || input < a.in_features);
    if constexpr (F::ROUNDED_IN_GROUPS) start_row_scales(slot + S::ROW_SCALES);
  }
  __device__ void start_row_scales(uint32_t to) const {
    constexpr int UNITS = S::ROWS / 4 * F::RECORDS;  // units of 4 rows
#pragma unroll
    for (int first = 0; first < UNITS; first += S::THREADS) {
      const int i = first + threadIdx.x;
      if (i >= UNITS) continue;
      const int row = next.tile % a.row_tiles * S::ROWS + i % (S::ROWS / 4) * 4;
      const int subgroup = next.chunk * F::RECORDS + i / (S::ROWS / 4);
      copy_16(to + i * 16, a.row_scale + int64_t(subgroup) * a.row_pitch + row,
              row < a.row_pitch && subgroup < a.subgroups);
    }
  }
};

static __device__ inline float read_only(Type type, const void* from, int64_t index) {
  if (type == Type::f32) return __ldg(static_cast<const float*>(from) + index);
  if (type == Type::bf16) return to_float(__ldg(static_cast<const __nv_bfloat16*>(from) + index));
  return to_float(__ldg(static_cast<const __half*>(from) + index));
}

static __device__ inline void store(const Tiled& a, int64_t index, float value) {
  if (a.out_type == Type::bf16) static_cast<__nv_bfloat16*>(a.out)[index] = __float2bfloat16_rn(value);
  else if (a.out_type == Type::f32) static_cast<float*>(a.out)[index] = value;
  else static_cast<__half*>(a.out)[index] = __float2half_rn(value);
}

// Stores a warp's sums. `row`, `output`: those of this lane's first sum.
template <class F, int M, int N>
static __device__ inline void store_sums(const Tiled& a, const typename F::Sum (&sums)[N][M][4], int row, int output) {
  const bool pairs = a.out_type == Type::bf16 && a.out_stride % 2 == 0 && reinterpret_cast<uintptr_t>(a.out) % 4 == 0;
  float row_scale[M][2];
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + 16 * m + 8 * h;
      row_scale[m][h] = F::ROUNDED && !F::ROUNDED_IN_GROUPS && r < a.rows ? __ldg(a.row_scale + r) : 1.0f;
    }
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int first = output + 8 * n;
    if (first >= a.out_features) continue;
    const bool both = first + 1 < a.out_features;
    float scale[2] = {1.0f, 1.0f}, shift[2] = {};
#pragma unroll
    for (int c = 0; c < 2; c++) {
      if (c && !both) continue;
      if (a.scale) scale[c] = __ldg(a.scale + first + c);
      if (a.bias) shift[c] = read_only(a.bias_type, a.bias, first + c);
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int r = row + 16 * m + 8 * h;
        if (r >= a.rows) continue;
        const int64_t index = r * a.out_stride + first;
        float values[2];
#pragma unroll
        for (int c = 0; c < 2; c++) values[c] = float(sums[n][m][2 * h + c]) * (row_scale[m][h] * scale[c]) + shift[c];
        if (pairs && both) {
          *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.out) + index) =
              __floats2bfloat162_rn(values[0], values[1]);
          continue;
        }
        store(a, index, values[0]);
        if (both) store(a, index + 1, values[1]);
      }
  }
}

static __device__ inline float bits(int sum) { return __int_as_float(sum); }
static __device__ inline float bits(float sum) { return sum; }
template <class Sum>
static __device__ inline Sum sum_of_bits(float bits) {
  if constexpr (std::is_same_v<Sum, int>) return __float_as_int(bits);
  else return bits;
}

// Writes the sums of a part of a tile. Returns true in the block that arrives last, with the sums of all parts.
template <class S, class Sum, int M, int N>
static __device__ inline bool add_parts(const Tiled& a, Sum (&sums)[N][M][4], int first_block, int last_block) {
  __shared__ int last;
  constexpr int PARTS = M * N > 16 ? 1 : M * N > 8 ? 2 : 4;  // parts that a thread reads at a time
  const int block = blockIdx.x;
  auto part_of = [&](int b) {
    return reinterpret_cast<float4*>(a.partials + (2 * int64_t(b) + (b == first_block)) * S::PARTIAL) + threadIdx.x;
  };
  float4* to = part_of(block);
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int m = 0; m < M; m++)
      to[(n * M + m) * S::THREADS] = {bits(sums[n][m][0]), bits(sums[n][m][1]), bits(sums[n][m][2]), bits(sums[n][m][3])};
  S::sync();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(a.arrivals + first_block, 1) == last_block - first_block;
    if (last) a.arrivals[first_block] = 0;
    __threadfence();
  }
  S::sync();
  if (!last) return false;
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[n][m][i] = 0;
  for (int b = first_block; b <= last_block; b += PARTS) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int m = 0; m < M; m++) {
        float4 parts[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; p++)
          parts[p] = b + p <= last_block ? __ldcg(part_of(b + p) + (n * M + m) * S::THREADS) : float4{};
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          sums[n][m][0] += sum_of_bits<Sum>(parts[p].x);
          sums[n][m][1] += sum_of_bits<Sum>(parts[p].y);
          sums[n][m][2] += sum_of_bits<Sum>(parts[p].z);
          sums[n][m][3] += sum_of_bits<Sum>(parts[p].w);
        }
      }
  }
  return true;
}

// The grid has any number of blocks.
template <class S, int MIN_BLOCKS>
__global__ void __launch_bounds__(S::THREADS, MIN_BLOCKS) tiled(const __grid_constant__ Tiled a) {
  using F = typename S::Format;
  using Sum = typename F::Sum;
  constexpr int M = S::M, N = S::N, WARPS_M = S::WARPS_M, SLOTS = S::SLOTS;
  extern __shared__ __align__(128) char memory[];
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % WARPS_M * 16 * M, warp_output = warp / WARPS_M * 8 * N;
  const Schedule schedule(a);
  const int count = schedule.count();
  Iteration at = schedule.start();
  TileCopy<S> copy(a, schedule, memory);

  if (!a.resident) wait_for_previous();
#pragma unroll
  for (int slot = 0; slot < SLOTS - 1; slot++) {
    if (slot >= count) break;
    copy.start_weights(slot);
    copy.advance();
  }
  if (a.resident) wait_for_previous();
  copy.set(at);
#pragma unroll
  for (int slot = 0; slot < SLOTS - 1; slot++) {
    if (slot < count) {
      copy.start_rows(slot);
      copy.advance();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  Sum sums[N][M][4] = {};
  int slot = 0, free_slot = SLOTS - 1;
  for (int i = 0; i < count; i++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 2) : "memory");
    __syncthreads();
    const uint32_t from = copy.ring + slot * S::SLOT;
    F::template multiply<M, N>(sums, Chunk{from + warp_row * S::X_ROW,
                                           from + S::WEIGHT + warp_output * F::WEIGHT_BYTES,
                                           from + S::RECORDS + warp_output * F::RECORDS * 4,
                                           from + S::ROW_SCALES + warp_row * 4, S::ROWS}, lane);
    if (i + SLOTS - 1 < count) {  // the tensor cores are still busy, and all warps have read the free slot
      copy.start_weights(free_slot);
      copy.start_rows(free_slot);
      copy.advance();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
    free_slot = free_slot + 1 == SLOTS ? 0 : free_slot + 1;
    if (at.chunk + 1 == a.chunks || i + 1 == count) {
      const int2 blocks = schedule.blocks_of(at.tile);
      if (blocks.x == blocks.y || add_parts<S>(a, sums, blocks.x, blocks.y))
        store_sums<F, M, N>(a, sums, at.tile % a.row_tiles * S::ROWS + warp_row + lane / 4,
                            at.tile / a.row_tiles * S::OUTPUTS + warp_output + lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int j = 0; j < 4; j++) sums[n][m][j] = 0;
    }
    schedule.advance(at);
  }
}

}  // namespace localllm::cuda
