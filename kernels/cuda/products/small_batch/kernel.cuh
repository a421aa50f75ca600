// Products of 1 to 16 rows. The kernel is bound by memory bandwidth: it reads each weight once and keeps many loads in
// flight.
//
// A tile is 8 * J outputs and all inputs. The grid has one block of 16 warps per multiprocessor; block b computes tiles
// b, b + gridDim, … A chunk is 64 bytes of each of 8 outputs. Each lane loads 16 bytes of a chunk. They are operand B
// of mma.sync, and the activations are operand A. Both operands use the same permutation of the inputs, so a lane needs
// no shuffle:
//
//   lane = 4 g + t         weights: output g of 8, bytes 16 t … 16 t + 15 of the chunk
//                          activations: rows g (and g + 8), the inputs of these bytes
//                          sums: rows g (and g + 8), outputs 2 t and 2 t + 1
//
//   [warp 0][warp 1] … [warp 15][warp 0] …      the chunks of an output in order of the inputs; a warp has P per step
//
// The ring buffer in shared memory has no barriers: each thread copies its bytes by cp.async and reads only bytes that
// it copied. Weights are prefetched into the ring before the previous kernel has ended. The sums of the warps are added
// in a fixed order, so the result does not depend on the number of rows or blocks.
#pragma once

#include "../../device/mma.cuh"
#include "../prepared_rows.cuh"

namespace localllm::cuda {

template <int BYTES>
static __device__ inline void copy_async(uint32_t to, const void* from, bool exists) {
  int size = exists ? BYTES : 0;  // cp.async fills the bytes after `size` with zeros
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size) : "memory");
}

static __device__ inline void commit_slot() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
static __device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Waits until all but the last `pending` slots have been copied.
static __device__ inline void wait_slots(int pending) {
  switch (pending) {
    case 8: return wait_copies<8>();
    case 9: return wait_copies<9>();
    case 10: return wait_copies<10>();
    case 11: return wait_copies<11>();
    case 1: return wait_copies<1>();
    case 2: return wait_copies<2>();
    case 3: return wait_copies<3>();
    case 4: return wait_copies<4>();
    case 5: return wait_copies<5>();
    case 6: return wait_copies<6>();
    default: return wait_copies<7>();
  }
}

// The tile and step that this block fetches or computes.
struct Position {
  int tile, step;
  __device__ bool advance(int steps) {
    if (++step < steps) return false;
    step = 0;
    tile += gridDim.x;
    return true;
  }
};

// The copies and addresses of the ring. F: weight format (formats.cuh); NT: groups of 8 rows, 1 or 2.
template <class F, int J, int P, int NT>
struct Stream {
  static constexpr int VECTOR_BYTES = 8 * sizeof(typename F::X);  // bytes of 8 activations

  const SmallBatch& a;
  uint32_t ring, prepared;  // addresses in shared memory: slot 0 of the ring; the prepared activations
  int tid, warp, g, t, chunks, steps, tiles;

  __device__ Stream(const SmallBatch& a, void* memory, void* prepared_x) : a(a) {
    tid = threadIdx.x;
    warp = tid / 32;
    g = tid % 32 / 4;
    t = tid % 4;
    ring = uint32_t(__cvta_generic_to_shared(memory));
    prepared = uint32_t(__cvta_generic_to_shared(prepared_x));
    chunks = int((a.row_bytes + 63) / 64);
    steps = (chunks + WARPS * P - 1) / (WARPS * P);
    tiles = (a.out_features + 8 * J - 1) / (8 * J);
  }
  // The index of the j-th block of 8 outputs of a tile. With gates, even j are gates and odd j the values they
  // multiply.
  __device__ int block_of(int tile, int j) const {
    return a.gated ? tile * (J / 2) + j / 2 + (j % 2) * (a.gated / 8) : tile * J + j;
  }
  // Addresses in a slot: weights, their scales, activations, activation scales. The lanes of a warp are contiguous.
  __device__ uint32_t weight_address(int slot, int i) const {
    return ring + slot * a.slot_bytes + (i * THREADS + tid) * 16;
  }
  __device__ uint32_t record_address(int slot, int i) const {
    return ring + slot * a.slot_bytes + J * P * THREADS * 16 + (i * THREADS + tid) * 4;
  }
  __device__ uint32_t x_address(int slot, int i) const {
    return ring + slot * a.slot_bytes + J * P * THREADS * (16 + 4 * F::RECORDS) + (i * THREADS + tid) * VECTOR_BYTES;
  }
  __device__ uint32_t subgroup_scale_address(int slot, int i) const {
    return x_address(slot, P * NT * F::VECTORS) - tid * VECTOR_BYTES + (i * THREADS + tid) * 4;
  }
  __device__ int chunk_of(int step, int p) const { return (step * P + p) * WARPS + warp; }

  // This lane's global addresses in the tile that is fetched next.
  struct Source {
    const uint8_t* row[J];
    const uint32_t* record[J];
    uint32_t exists;  // bit j: output j of this lane exists
  };
  __device__ Source source(int tile) const {
    Source from{};
#pragma unroll
    for (int j = 0; j < J; j++) {
      int block = block_of(tile, j), output = block * 8 + g;
      bool exists = tile < tiles && output < a.out_features;
      from.row[j] = a.weight + (exists ? output * a.row_bytes : 0) + t * 16;
      if (F::RECORDS) from.record[j] = a.records + (exists ? int64_t(block) * a.subgroups * 8 + g : 0);
      from.exists |= exists << j;
    }
    return from;
  }
  __device__ void fetch_weights(const Source& from, int step, int slot) const {
#pragma unroll
    for (int p = 0; p < P; p++) {
      int chunk = chunk_of(step, p);
      bool inside = chunk * 64 + t * 16 < int(a.row_bytes);
#pragma unroll
      for (int j = 0; j < J; j++)
        copy_async<16>(weight_address(slot, j * P + p), inside ? from.row[j] + chunk * 64 : from.row[j],
                       inside && (from.exists >> j & 1));
#pragma unroll
      for (int r = 0; r < F::RECORDS; r++) {
        int subgroup = F::subgroup_of(a, chunk, r);
        inside = subgroup < a.subgroups;
#pragma unroll
        for (int j = 0; j < J; j++)
          copy_async<4>(record_address(slot, (j * P + p) * F::RECORDS + r),
                        from.record[j] + (inside ? subgroup * 8 : 0), inside && (from.exists >> j & 1));
      }
    }
  }
  __device__ void fetch_x(int step, int slot) const {
#pragma unroll
    for (int p = 0; p < P; p++)
#pragma unroll
      for (int h = 0; h < NT; h++) {
        int row = g + 8 * h, chunk = chunk_of(step, p);
        if (row >= a.rows) continue;
        const typename F::X* from = static_cast<const typename F::X*>(a.x) + row * a.x_stride;
#pragma unroll
        for (int i = 0; i < F::VECTORS; i++) {
          int k = chunk * F::CHUNK + F::input_of(i, t);
          copy_async<VECTOR_BYTES>(x_address(slot, (p * NT + h) * F::VECTORS + i), k < a.in_features ? from + k : from,
                                   k < a.in_features);
        }
        if (F::ROUNDED_IN_GROUPS)
#pragma unroll
          for (int r = 0; r < F::RECORDS; r++) {
            int subgroup = chunk * F::RECORDS + r;
            copy_async<4>(subgroup_scale_address(slot, (p * NT + h) * F::RECORDS + r),
                          a.subgroup_scale + (subgroup < a.subgroups ? row * a.subgroups + subgroup : 0),
                          subgroup < a.subgroups);
          }
      }
  }
  __device__ void load_x(int step, int slot, int p, uint32_t (&x)[NT][F::VECTORS][VECTOR_BYTES / 4]) const {
    int chunk = chunk_of(step, p);
#pragma unroll
    for (int h = 0; h < NT; h++)
#pragma unroll
      for (int i = 0; i < F::VECTORS; i++) {
        int row = g + 8 * h;
        uint32_t from = x_address(slot, (p * NT + h) * F::VECTORS + i);
        if (a.prepared_pitch)
          from = prepared + row * a.prepared_pitch + (chunk * F::CHUNK + F::input_of(i, t)) * sizeof(typename F::X);
#pragma unroll
        for (int e = 0; e < VECTOR_BYTES / 4; e++) x[h][i][e] = 0;
        if (row >= a.rows || chunk >= chunks) continue;
        if constexpr (VECTOR_BYTES == 16)
          asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                       : "=r"(x[h][i][0]), "=r"(x[h][i][1]), "=r"(x[h][i][2]), "=r"(x[h][i][3]) : "r"(from));
        else
          asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x[h][i][0]), "=r"(x[h][i][1]) : "r"(from));
      }
  }
};

constexpr int LORA_SHARES = 8;  // shares of an inner product that a thread reads early

// The LoRA products of a block: inner products in shared memory, [rows][width].
struct LoraRows {
  const LoraTerm& lora;
  float* inner;
  int* slots;  // [rows]; 0: no adapter

  // All threads call it, and a barrier follows. No kernel writes the slots.
  __device__ void read_slots(int rows) const {
    if (int(threadIdx.x) >= rows) return;
    const int slot = lora.slots[lora.first + int(threadIdx.x)];
    slots[threadIdx.x] = slot > 0 && slot < lora.slot_count ? slot : 0;
  }
  // The share of an inner product, after the kernel that computed it has ended. Element e is [row][column].
  __device__ float share(int rows, int e, int index) const {
    const bool exists = e < rows * lora.width && index < lora.shares;
    const int64_t stride = int64_t(lora.tokens) * lora.width, first = int64_t(lora.first) * lora.width;
    return exists ? lora.inner[index * stride + first + e] : 0.0f;
  }
  // Starts to read the first shares of this thread's element.
  __device__ void read_shares(int rows, float (&shares)[LORA_SHARES]) const {
#pragma unroll
    for (int i = 0; i < LORA_SHARES; i++) shares[i] = share(rows, int(threadIdx.x), i);
  }
  // Adds up the shares. All threads call it, and a barrier follows. `shares`: see read_shares.
  __device__ void sum_shares(int rows, const float (&shares)[LORA_SHARES]) const {
    for (int e = int(threadIdx.x); e < rows * lora.width; e += THREADS) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < LORA_SHARES; i++) sum += e < THREADS ? shares[i] : share(rows, e, i);
#pragma unroll 1
      for (int i = LORA_SHARES; i < lora.shares; i++) sum += share(rows, e, i);
      inner[e] = slots[e / lora.width] ? sum : 0.0f;
    }
  }
  __device__ const __nv_bfloat16* factors(int slot, int64_t output) const {
    return static_cast<const __nv_bfloat16*>(lora.b) + slot * lora.b_stride + output * lora.rank;
  }
  // The product of an output. `first`: its factors of the first 8 ranks.
  __device__ float product(int row, int slot, int64_t output, uint4 first) const {
    const int slice = (output >= lora.ends[0]) + (output >= lora.ends[1]);
    const float* x = inner + row * lora.width + slice * lora.rank;
    float sum = 0.0f;
#pragma unroll 1  // fewer registers: a block of the shrink kernel must fit beside this block
    for (int k = 0; k < lora.rank; k += 8) {
      float values[8], products[8];
      if (k) first = *reinterpret_cast<const uint4*>(factors(slot, output) + k);
      unpack(first, values);
      load<8>(x + k, products);
#pragma unroll
      for (int i = 0; i < 8; i++) sum += values[i] * products[i];
    }
    return sum;
  }
};

// One output of a tile. One thread reduces the warps' sums of it, or of a gate and the value that the gate multiplies.
struct Epilogue {
  bool active;           // false: this thread has no output in this tile
  int row, tile_output;  // tile_output: index of the output in the tile
  int64_t output;
  float scale[2], shift[2];  // loaded early, so that the products of the tile hide their latency
  uint4 factors;  // the LoRA factors of the first 8 ranks, if the row has an adapter
};

template <class F, int J, bool LORA, class S>
static __device__ inline Epilogue epilogue_of(const SmallBatch& a, const S& s, const LoraRows& lora, int tile,
                                              int iteration) {
  int e = (s.tid + iteration * 32) % THREADS;  // index of this thread's output; each tile begins with a different warp
  int row = a.gated ? e / (J * 4) : e / (J * 8), tile_output = a.gated ? e % (J * 4) : e % (J * 8);
  Epilogue epilogue{row < a.rows, row, tile_output, int64_t(tile) * (a.gated ? J * 4 : J * 8) + tile_output,
                    {1.0f, 1.0f}, {}, {}};
  epilogue.active &= epilogue.output < (a.gated ? a.gated : a.out_features);
  if (!epilogue.active) return epilogue;
  if constexpr (LORA)
    if (int slot = lora.slots[row])
      epilogue.factors = *reinterpret_cast<const uint4*>(lora.factors(slot, epilogue.output));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (i && !a.gated) break;
    int64_t output = epilogue.output + i * a.gated;
    if (a.scale) epilogue.scale[i] = a.scale[output];
    if (a.bias) epilogue.shift[i] = number(a.bias, a.bias_type, output);
  }
  return epilogue;
}

// Writes each warp's sums of a tile to `partial` [warp][J][rows][8], reduces them over the warps and stores the
// outputs. With two such buffers, warps without outputs continue with the next tile. `single_buffer`: there is one
// buffer.
template <class F, int J, int NT, bool LORA, class S>
static __device__ inline void finish(const SmallBatch& a, const S& s, const PreparedRows<F>& rows,
                                     typename F::Sum* partial, const typename F::Sum (&sums)[J][4],
                                     const LoraRows& lora, const Epilogue& epilogue, bool single_buffer) {
  if (single_buffer) __syncthreads();  // waits until the sums of the previous tile have been read
#pragma unroll
  for (int j = 0; j < J; j++)
#pragma unroll
    for (int h = 0; h < NT; h++) {
      if (s.g + 8 * h >= a.rows) continue;
      typename F::Sum* to = partial + ((s.warp * J + j) * a.rows + s.g + 8 * h) * 8 + 2 * s.t;
      to[0] = sums[j][2 * h];
      to[1] = sums[j][2 * h + 1];
    }
  __syncthreads();
  if (!epilogue.active) return;
  auto value = [&](int i, int j) {
    typename F::Sum sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      sum += partial[((w * J + j) * a.rows + epilogue.row) * 8 + epilogue.tile_output % 8];
    float scale = epilogue.scale[i];
    if (sizeof(typename F::X) == 1 && !F::ROUNDED_IN_GROUPS)
      scale = (a.prepared_pitch ? rows.row_scale[epilogue.row] : a.row_scale[epilogue.row]) * scale;
    float output = float(sum) * scale + epilogue.shift[i];
    if constexpr (LORA)
      if (int slot = lora.slots[epilogue.row])
        output += lora.product(epilogue.row, slot, epilogue.output, epilogue.factors);
    return output;
  };
  int j = epilogue.tile_output / 8;
  float result = a.gated ? activated(a.gate, rounded(value(0, 2 * j))) * rounded(value(1, 2 * j + 1)) : value(0, j);
  put(a.out, a.out_type, epilogue.row * a.out_stride + epilogue.output, result);
}

// Minimum of resident blocks per multiprocessor. 2 limits the registers, so that a block of the next kernel can
// prefetch its weights; this is faster for short products and slower for long ones.
template <class F, int J, int NT, bool LORA>
constexpr int RESIDENT_BLOCKS = F::RECORDS == 0 && J == 1 && NT == 1 && !LORA ? 2 : 1;

template <class F, int J, int P, int NT, bool LORA>
__global__ void __launch_bounds__(THREADS, (RESIDENT_BLOCKS<F, J, NT, LORA>)) small_batch(const SmallBatch a) {
  extern __shared__ uint4 memory[];
  using S = Stream<F, J, P, NT>;
  using Sum = typename F::Sum;
  char* after_ring = reinterpret_cast<char*>(memory) + a.slots * a.slot_bytes;
  Sum* partial = reinterpret_cast<Sum*>(after_ring);
  __shared__ alignas(32) float lora_inner[LORA ? MAX_LORA_INNER : 1];
  __shared__ int lora_slots[LORA ? MAX_LORA_ROWS : 1];
  const LoraRows lora{a.lora, lora_inner, lora_slots};
  PreparedRows<F> rows(a, after_ring + a.sum_buffers * WARPS * J * a.rows * 8 * sizeof(Sum));
  S s(a, memory, rows.x);
  if (!a.resident) wait_for_previous();
  Position fetch_position{int(blockIdx.x), 0};
  auto from = s.source(fetch_position.tile);
  auto fetch = [&](int slot) {
    s.fetch_weights(from, fetch_position.step, slot);
    if (fetch_position.advance(s.steps)) from = s.source(fetch_position.tile);
  };
  if (LORA) lora.read_slots(a.rows);
  for (int slot = 0; slot < a.slots - 1; slot++) {
    fetch(slot);
    commit_slot();
  }
  if (a.resident) wait_for_previous();
  float shares[LORA ? LORA_SHARES : 1];
  if constexpr (LORA) lora.read_shares(a.rows, shares);
  int first_wait = 0;  // 1: the first step waits for the activations, which were copied after the weights of all slots
  if (a.prepared_pitch) {
    rows.fill();
  } else {
    for (int slot = 0; slot < a.slots - 1; slot++) s.fetch_x(slot % s.steps, slot);
    commit_slot();
    first_wait = 1;
  }
  if constexpr (LORA) {
    __syncthreads();  // the slots have been read
    lora.sum_shares(a.rows, shares);
  }
  launch_dependents();  // not earlier: the next kernel's prefetches would delay this kernel's activations

  int slot = 0, next_slot = a.slots - 1, iteration = 0;
  for (int tile = blockIdx.x; tile < s.tiles; tile += gridDim.x, iteration++) {
    Epilogue epilogue = epilogue_of<F, J, LORA>(a, s, lora, tile, iteration);
    Sum sums[J][4] = {};
    for (int step = 0; step < s.steps; step++) {
      if (!a.prepared_pitch) s.fetch_x(fetch_position.step, next_slot);
      fetch(next_slot);
      commit_slot();
      wait_slots(first_wait ? 1 : a.slots - 1);
      first_wait = 0;
#pragma unroll
      for (int p = 0; p < P; p++) {
        uint32_t x[NT][F::VECTORS][S::VECTOR_BYTES / 4];
        s.load_x(step, slot, p, x);
        typename F::template Activations<NT> activations(x);
#pragma unroll
        for (int j = 0; j < J; j++) {
          uint32_t w[4];
          asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                       : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                       : "r"(s.weight_address(slot, j * P + p)));
          activations.multiply(sums[j], w, s, rows, step, slot, j * P + p, p);
        }
      }
      next_slot = slot;
      if (++slot == a.slots) slot = 0;
    }
    Sum* buffer = partial + iteration % a.sum_buffers * (WARPS * J * a.rows * 8);
    finish<F, J, NT, LORA>(a, s, rows, buffer, sums, lora, epilogue, a.sum_buffers == 1);
  }
  wait_copies<0>();
}

}  // namespace localllm::cuda
