// The tiled kernel (kernel.cuh) for Hopper (sm_90a), with wgmma and TMA copies.
//
// A tile is 128 outputs times 8 * N rows. Weights are operand A of wgmma and activations operand B, so that few rows
// need few columns. A producer warp copies chunks of 128 inputs to a ring buffer; two consumer warpgroups multiply 64
// outputs each. They unpack weights in registers; weights with the type of the activations stay in shared memory. Warpgroups have no common
// barrier, so one unpacks or scales while the tensor cores multiply for the other.
//
// The order of the inputs in a row of activations is the order in which a lane unpacks weights (round_rows.cu).
#pragma once

#include "hopper_wgmma.cuh"
#include "../../device/tensor_map.h"
#include "kernel.cuh"
#include "plan.h"

namespace localllm::cuda {

struct HopperMaps {
  CUtensorMap x, weight, records, row_scales;
};

template <class F, int N_>
struct HopperShape {
  using Format = F;
  static constexpr int M = 1, N = N_, ROWS = 8 * N, OUTPUTS = 128, WARPGROUP = 128;
  static constexpr int THREADS = 2 * WARPGROUP;  // consumers
  static constexpr int PARTIAL = ROWS * OUTPUTS;
  static constexpr int PANEL = ROWS * 128;  // bytes of 128 bytes of each row
  // Slots per chunk. Two for the largest chunks: the ring then has enough slots to hide the latency of memory.
  static constexpr int PARTS = N == 32 && F::X_BYTES == 2 ? 2 : 1;
  static constexpr int PANELS = F::X_BYTES / PARTS, WEIGHT_BYTES = F::WEIGHT_BYTES / PARTS;  // of a slot
  // Offsets in a slot of the ring.
  static constexpr int WEIGHT = PANEL * PANELS, RECORDS = WEIGHT + OUTPUTS * WEIGHT_BYTES;
  static constexpr int ROW_SCALES = RECORDS + OUTPUTS * F::RECORDS * 4;
  static constexpr int BYTES = ROW_SCALES + (F::ROUNDED_IN_GROUPS ? ROWS * F::RECORDS * 4 : 0);
  static constexpr int SLOT = (BYTES + hopper::ATOM - 1) / hopper::ATOM * hopper::ATOM;
  static constexpr int SLOTS = SLOT * 8 < (200 << 10) ? 8 : (200 << 10) / SLOT;
  static constexpr int SHARED = SLOTS * SLOT + 2 * SLOTS * 8 + hopper::ATOM;
  static_assert(PARTS == 1 || F::RECORDS == 0);
  static_assert(PARTIAL * 4 <= SLOTS * SLOT, "store_in_cluster keeps the sums in the ring");
  // The time to add parts of tiles through global memory, in chunks. Formats that are not unpacked have faster chunks.
  static constexpr int SUM_COST = F::X_BYTES == 1 && F::WEIGHT_BYTES == 128 ? 27 : 11;
  static constexpr bool RECORDS_AT_ONCE = F::WEIGHT_BYTES == 64;  // one copy has all records of a chunk

  // A barrier of the consumers.
  static __device__ void sync() { hopper::named_barrier_sync(1, THREADS); }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A slot of the ring buffer and the parity of its phase.
template <int SLOTS>
struct HopperSlot {
  int index = 0, parity = 0;
  __device__ void advance() {
    if (++index < SLOTS) return;
    index = 0;
    parity ^= 1;
  }
};

template <class S>
struct HopperRing {
  using F = typename S::Format;
  char* slots;
  uint64_t *full, *empty;

  __device__ explicit HopperRing(char* memory) {
    slots = memory + (-int(hopper::address(memory)) & (hopper::ATOM - 1));
    full = reinterpret_cast<uint64_t*>(slots + S::SLOTS * S::SLOT);
    empty = full + S::SLOTS;
  }
  __device__ void initialise() const {
    for (int i = 0; i < S::SLOTS; i++) {
      hopper::init(full[i], 1);
      hopper::init(empty[i], S::THREADS / 32);
    }
    hopper::fence_barrier_init();
  }
  __device__ void copy_weights(const Tiled& a, const HopperMaps& maps, const Iteration& at, int part, int index) const {
    char* to = slots + index * S::SLOT;
    const int first = at.tile / a.row_tiles * S::OUTPUTS;
    hopper::arrive_expecting(full[index], S::BYTES);
    hopper::copy_box(to + S::WEIGHT, maps.weight, full[index], (at.chunk * S::PARTS + part) * S::WEIGHT_BYTES, first, 0);
    if constexpr (F::RECORDS > 0 && S::RECORDS_AT_ONCE)
      hopper::copy_box(to + S::RECORDS, maps.records, full[index], 0, at.chunk * F::RECORDS, first / 8);
    if constexpr (F::RECORDS > 0 && !S::RECORDS_AT_ONCE)
      for (int r = 0; r < F::RECORDS; r++)
        hopper::copy_box(to + S::RECORDS + r * S::OUTPUTS * 4, maps.records, full[index], 0,
                         (at.chunk * F::RECORDS + r) / a.records_per_subgroup, first / 8);
  }
  __device__ void copy_rows(const Tiled& a, const HopperMaps& maps, const Iteration& at, int part, int index) const {
    char* to = slots + index * S::SLOT;
    const int first = at.tile % a.row_tiles * S::ROWS;
    for (int panel = 0; panel < S::PANELS; panel++) {
      const int column = ((at.chunk * S::PARTS + part) * S::PANELS + panel) * 128;
      hopper::copy_box(to + panel * S::PANEL, maps.x, full[index], column, first, 0);
    }
    if constexpr (F::ROUNDED_IN_GROUPS)
      hopper::copy_box(to + S::ROW_SCALES, maps.row_scales, full[index], first, at.chunk * F::RECORDS, 0);
  }
  __device__ void release(int index, int lane) const {
    if (lane == 0) hopper::arrive(empty[index]);
  }
};

// The producer: one thread. Weights of the first slots are copied before the previous kernel has ended.
template <class S>
__device__ inline void produce(const Tiled& a, const HopperMaps& maps, const HopperRing<S>& ring,
                               const Schedule& schedule) {
  const int count = schedule.count() * S::PARTS, first = min(count, S::SLOTS);
  Iteration at = schedule.start(), next = at;
  int part = 0, next_part = 0;
  auto advance = [&](Iteration& iteration, int& part_of_iteration) {
    if (S::PARTS > 1 && ++part_of_iteration < S::PARTS) return;
    part_of_iteration = 0;
    schedule.advance(iteration);
  };
  if (!a.resident) wait_for_previous();
  for (int i = 0; i < first; i++) {
    ring.copy_weights(a, maps, next, next_part, i);
    advance(next, next_part);
  }
  if (a.resident) wait_for_previous();
  for (int i = 0; i < first; i++) {
    ring.copy_rows(a, maps, at, part, i);
    advance(at, part);
  }
  HopperSlot<S::SLOTS> slot;
  for (int i = first; i < count; i++, slot.advance()) {
    hopper::wait_barrier(ring.empty[slot.index], slot.parity);
    ring.copy_weights(a, maps, at, part, slot.index);
    ring.copy_rows(a, maps, at, part, slot.index);
    advance(at, part);
  }
}

// A compiler barrier: the compiler does not move reads or writes of the sums across it.
template <class Sum, int N>
__device__ inline void fence_sums(Sum (&sums)[N][1][4]) {
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (std::is_same_v<Sum, int>) asm volatile("" : "+r"(sums[n][0][i])::"memory");
      else asm volatile("" : "+f"(sums[n][0][i])::"memory");
    }
}
template <int STEPS>
__device__ inline void fence_operands(uint32_t (&operands)[STEPS][4]) {
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(operands[k][i])::"memory");
}

template <int N>
__device__ inline void multiply_registers(int (&sums)[N][1][4], const uint32_t (&a)[4], uint64_t b, bool adding) {
  hopper::multiply_int8<N>(sums, a, b, adding);
}
template <int N>
__device__ inline void multiply_registers(float (&sums)[N][1][4], const uint32_t (&a)[4], uint64_t b, bool adding) {
  hopper::multiply_bf16<N>(sums, a, b, adding);
}

template <int N>
__device__ inline void multiply_shared_tiles(int (&sums)[N][1][4], uint64_t a, uint64_t b, bool adding) {
  hopper::multiply_int8<N>(sums, a, b, adding);
}
template <int N>
__device__ inline void multiply_shared_tiles(float (&sums)[N][1][4], uint64_t a, uint64_t b, bool adding) {
  hopper::multiply_e4m3<N>(sums, a, b, adding);
}

// Operand A and the scales of a warp's 16 outputs in a group. STEPS: wgmma per group of inputs.
// `weight`: the warp's first output in the slot; `records`: the records of its first block of 8 outputs.
template <class F>
struct HopperOperands;

template <int PER_CHUNK>
struct HopperOperands<TiledInt4<PER_CHUNK>> {
  using F = TiledInt4<PER_CHUNK>;
  using Product = int;
  static constexpr int GROUPS = PER_CHUNK, STEPS = 4 / PER_CHUNK, STEP_BYTES = 32;
  uint32_t a[STEPS][4];
  float scale[2];
  __device__ void load(uint32_t weight, uint32_t records, int p, int lane) {
    const int g = lane / 4, t = lane % 4;
    uint32_t zeros[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t record = shared_word(records + (h * PER_CHUNK + p) * 32 + g * 4);
      scale[h] = __half2float(__ushort_as_half((unsigned short)record));
      zeros[h] = __byte_perm(record, 0, 0x2222);
      uint32_t words[STEPS];
      load_words(words, weight + (g + 8 * h) * 64 + t * 16 + p * STEPS * 4);
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        const uint32_t word = words[k];
        a[k][h] = F::centred(word, zeros[h]);
        a[k][2 + h] = F::centred(word >> 4, zeros[h]);
      }
    }
  }
};

template <int PER_CHUNK>
struct HopperOperands<TiledInt4Wide<PER_CHUNK>> {
  using F = TiledInt4Wide<PER_CHUNK>;
  using Product = float;
  static constexpr int GROUPS = PER_CHUNK, STEPS = 8 / PER_CHUNK, STEP_BYTES = 32;
  uint32_t a[STEPS][4];
  float scale[2];
  __device__ void load(uint32_t weight, uint32_t records, int p, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t record = shared_word(records + (h * PER_CHUNK + p) * 32 + g * 4);
      const uint32_t bias = __byte_perm(record, 0, 0x3232) | 0xc300c300u;
      scale[h] = __half2float(__ushort_as_half((unsigned short)record));
      uint32_t words[STEPS / 2];
      load_words(words, weight + (g + 8 * h) * 64 + t * 16 + p * STEPS * 2);
#pragma unroll
      for (int k = 0; k < STEPS; k += 2) {
        const uint32_t word = words[k / 2];
#pragma unroll
        for (int s = 0; s < 2; s++) {
          a[k + s][h] = F::centred(word >> 8 * s, bias);
          a[k + s][2 + h] = F::centred(word >> (8 * s + 4), bias);
        }
      }
    }
  }
};

template <bool GROUPED>
struct HopperOperands<TiledFp8<GROUPED>> {
  using Product = float;
  static constexpr int GROUPS = 2, STEPS = 4, STEP_BYTES = 32;
  uint32_t a[STEPS][4];
  float scale[2];
  // PARTS: slots per chunk, see HopperShape.
  template <int PARTS = 1>
  __device__ void load(uint32_t weight, uint32_t records, int p, int lane) {
    const int g = lane / 4, row = lane % 16;
#pragma unroll
    for (int h = 0; h < 2; h++)
      if constexpr (GROUPED)
        scale[h] = __uint_as_float(shared_word(records + p * 128 * 4 + h * 32 + g * 4));
#pragma unroll
    for (int k = 0; k < STEPS; k += 2) {
      uint32_t words[4];  // outputs g and g + 8 of 16 inputs, then of the next 16 inputs
      const int unit = (PARTS == 1 ? p * STEPS : 0) + k + lane / 16;
      if constexpr (PARTS == 1) load_matrices(words, weight + row * 128 + (unit ^ (row & 7)) * 16);
      else load_matrices(words, weight + row * 64 + (unit ^ (row / 2 & 3)) * 16);
#pragma unroll
      for (int s = 0; s < 2; s++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint2 wide = widened_e4m3(words[2 * s + h]);
          a[k + s][h] = wide.x;
          a[k + s][2 + h] = wide.y;
        }
    }
  }
};

// One warpgroup's part of a chunk. `warp`: 0 … 7 of both warpgroups.
template <class S>
struct HopperConsumer {
  using F = typename S::Format;
  using Sum = typename F::Sum;
  static constexpr int N = S::N;
  const HopperRing<S>& ring;
  int warp, lane;
  HopperSlot<S::SLOTS> slot;
  int pending = -1;   // slot that wgmma still reads; -1: none
  int released = -1;  // PARTS == 2: slot that wgmma read before; it is released after the next wait

  // Bytes from the start of a slot to the descriptor of step `k` of the activations.
  static __device__ int step_offset(int k) { return k / 4 * S::PANEL + k % 4 * 32; }

  // Weights with the type of the activations: operand A is in shared memory.
  __device__ void multiply_shared(Sum (&sums)[N][1][4]) {
    hopper::wait_barrier(ring.full[slot.index], slot.parity);
    const char* from = ring.slots + slot.index * S::SLOT;
    const uint64_t x = hopper::descriptor(from, hopper::ATOM, 16);
    const uint64_t weight = hopper::descriptor(from + S::WEIGHT + warp / 4 * 64 * 128, hopper::ATOM, 16);
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
      multiply_shared_tiles<N>(sums, hopper::advance_descriptor(weight, 32 * k), hopper::advance_descriptor(x, 32 * k),
                               true);
    hopper::wgmma_commit();
    hopper::wgmma_wait<1>();
    if (pending >= 0) ring.release(pending, lane);
    pending = slot.index;
    slot.advance();
  }
  // Weights that are unpacked and have one scale per output. The operands of one half of a chunk are unpacked while
  // wgmma reads those of the other half.
  __device__ void multiply_unpacked(Sum (&sums)[N][1][4], HopperOperands<F> (&operands)[2]) {
    multiply_half<0>(sums, operands[0]);
    multiply_half<1>(sums, operands[1]);
  }
  // Waits for all slots of a chunk. If a wait came between the wgmma of a chunk, the compiler would serialise them.
  __device__ void wait_for_chunk() const {
    HopperSlot<S::SLOTS> next = slot;
    for (int part = 0; part < S::PARTS; part++, next.advance())
      hopper::wait_barrier(ring.full[next.index], next.parity);
  }
  template <int P>
  __device__ void multiply_half(Sum (&sums)[N][1][4], HopperOperands<F>& operands) {
    constexpr int STEPS = HopperOperands<F>::STEPS, FIRST = S::PARTS == 1 ? P * STEPS : 0;
    if (P == 0) wait_for_chunk();
    const char* from = ring.slots + slot.index * S::SLOT;
    const uint64_t x = hopper::descriptor(from, hopper::ATOM, 16);
    hopper::wgmma_wait<1>();
    fence_operands(operands.a);
    if (S::PARTS == 2 && released >= 0) ring.release(released, lane);
    if (S::PARTS == 1 && P == 1 && pending >= 0) ring.release(pending, lane);
    operands.template load<S::PARTS>(hopper::address(from + S::WEIGHT) + warp * 16 * S::WEIGHT_BYTES, 0, P, lane);
    fence_operands(operands.a);
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; k++)
      multiply_registers<N>(sums, operands.a[k], hopper::advance_descriptor(x, step_offset(FIRST + k)), true);
    hopper::wgmma_commit();
    if (P == 0 && S::PARTS == 1) return;
    released = pending;
    pending = slot.index;
    slot.advance();
  }
  // Weights with groups: the products of a group are scaled and added. The operands of a group are unpacked while wgmma
  // multiplies those of the previous group; with PRODUCTS == 2, its products are scaled then, too.
  static constexpr int PRODUCTS = N <= 8 ? 2 : 1;
  static constexpr int OPERANDS = N <= 8 || F::WEIGHT_BYTES == 128 ? 2 : 1;
  using Operands = HopperOperands<F>;
  struct Groups {
    Operands operands[OPERANDS];
    typename Operands::Product products[PRODUCTS][N][1][4];
    int p = 0;                      // group of the chunk that is loaded next
    int scaled = 0, scaled_p = 0;   // slot and group that are scaled next
  };
  // Loads the operands of the next group.
  template <int B>
  __device__ void load_group(Groups& groups) {
    if (Operands::GROUPS == 1 || groups.p == 0) hopper::wait_barrier(ring.full[slot.index], slot.parity);
    const uint32_t from = hopper::address(ring.slots) + slot.index * S::SLOT;
    groups.operands[B % OPERANDS].load(from + S::WEIGHT + warp * 16 * F::WEIGHT_BYTES,
                            from + S::RECORDS + warp * 2 * 32 * (S::RECORDS_AT_ONCE ? F::RECORDS : 1), groups.p, lane);
    fence_operands(groups.operands[B % OPERANDS].a);
  }
  // Starts the products of the loaded group.
  template <int B>
  __device__ void start_group(Groups& groups) {
    auto& products = groups.products[B % PRODUCTS];
    const uint64_t x = hopper::descriptor(ring.slots + slot.index * S::SLOT, hopper::ATOM, 16);
    fence_sums(products);
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Operands::STEPS; k++)
      multiply_registers<N>(products, groups.operands[B % OPERANDS].a[k],
                            hopper::advance_descriptor(x, step_offset(groups.p * Operands::STEPS + k)), k > 0);
    hopper::wgmma_commit();
    if (Operands::GROUPS > 1 && ++groups.p < Operands::GROUPS) return;
    groups.p = 0;
    slot.advance();
  }
  // Adds the products of a group, scaled, to the sums.
  template <int B>
  __device__ void scale_group(Sum (&sums)[N][1][4], Groups& groups) {
    auto& products = groups.products[B % PRODUCTS];
    fence_sums(products);
    fence_operands(groups.operands[B % OPERANDS].a);
    const uint32_t row_scales =
        hopper::address(ring.slots) + groups.scaled * S::SLOT + S::ROW_SCALES + lane % 4 * 8 + groups.scaled_p * S::ROWS * 4;
#pragma unroll
    for (int n = 0; n < N; n++) {
      float2 row_scale{1.0f, 1.0f};
      if constexpr (F::ROUNDED_IN_GROUPS) {
        const uint2 bits = shared_words2(row_scales + 8 * n * 4);
        row_scale = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
        sums[n][0][i] +=
            small_to_float(products[n][0][i]) * (groups.operands[B % OPERANDS].scale[i / 2] * (i % 2 ? row_scale.y : row_scale.x));
    }
    if (Operands::GROUPS > 1 && ++groups.scaled_p < Operands::GROUPS) return;
    groups.scaled_p = 0;
    __syncwarp();
    ring.release(groups.scaled, lane);
    if (++groups.scaled == S::SLOTS) groups.scaled = 0;
  }
  template <int B>
  __device__ void next_group(Sum (&sums)[N][1][4], Groups& groups) {
    if constexpr (OPERANDS == 1) {
      hopper::wgmma_wait<0>();
      scale_group<1 - B>(sums, groups);
      load_group<B>(groups);
      start_group<B>(groups);
      return;
    }
    load_group<B>(groups);
    if constexpr (PRODUCTS == 2) {
      start_group<B>(groups);
      hopper::wgmma_wait<1>();
      scale_group<1 - B>(sums, groups);
    } else {
      hopper::wgmma_wait<0>();
      scale_group<1 - B>(sums, groups);
      start_group<B>(groups);
    }
  }
  template <int B>
  __device__ void last_group(Sum (&sums)[N][1][4], Groups& groups) {
    hopper::wgmma_wait<0>();
    scale_group<B>(sums, groups);
  }
  __device__ void multiply_groups(Sum (&sums)[N][1][4], int chunks) {
    Groups groups;
    groups.scaled = slot.index;
    load_group<0>(groups);
    start_group<0>(groups);
    int i = 1;
    for (; i + 1 < chunks * Operands::GROUPS; i += 2) {
      next_group<1>(sums, groups);
      next_group<0>(sums, groups);
    }
    if (i < chunks * Operands::GROUPS) {
      next_group<1>(sums, groups);
      last_group<1>(sums, groups);
    } else {
      last_group<0>(sums, groups);
    }
  }
  // Waits until wgmma has ended, before the sums are read.
  __device__ void finish(Sum (&sums)[N][1][4]) {
    hopper::wgmma_wait<0>();
    fence_sums(sums);
    if (S::PARTS == 2 && released >= 0) ring.release(released, lane);
    if (pending >= 0) ring.release(pending, lane);
    pending = released = -1;
  }
};

// Transposes an 8 x 8 matrix of bf16 in a warp. Lane 4 g + t has the columns 2 t and 2 t + 1 of row g.
__device__ inline uint32_t transpose(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// The factors and shifts of the outputs of a lane, and its stores. The lane's first sum is that of `row` and `output`.
template <class S, class Sum>
struct OutputStore {
  using F = typename S::Format;
  const Tiled& a;
  int row, output, lane;
  float scale[2] = {1.0f, 1.0f}, shift[2] = {};

  __device__ OutputStore(const Tiled& a, int tile, int warp, int lane)
      : a(a), row(tile % a.row_tiles * S::ROWS + lane % 4 * 2),
        output(tile / a.row_tiles * S::OUTPUTS + warp * 16 + lane / 4), lane(lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int column = output + 8 * h;
      if (column >= a.out_features) continue;
      if (a.scale) scale[h] = __ldg(a.scale + column);
      if (a.bias) shift[h] = read_only(a.bias_type, a.bias, column);
    }
  }
  __device__ float row_scale(int r) const {
    return F::ROUNDED && !F::ROUNDED_IN_GROUPS && r < a.rows ? __ldg(a.row_scale + r) : 1.0f;
  }
  // True if the warp's 16 outputs exist and stores of 4 outputs are aligned.
  __device__ bool is_complete() const {
    return a.out_type == Type::bf16 && output - lane / 4 + 16 <= a.out_features && a.out_stride % 4 == 0 &&
           reinterpret_cast<uintptr_t>(a.out) % 8 == 0;
  }
  // The warp transposes its sums, so that four lanes store 16 outputs of a row.
  __device__ void store_rows(const Sum (&sums)[4], int n) const {
    const int t = lane % 4, first = output - lane / 4 + t / 2 * 4 + t % 2 * 8;
    const int r = row - 2 * t + lane / 4 + 8 * n;
    uint32_t pairs[2];
    const float factors[2] = {row_scale(row + 8 * n), row_scale(row + 8 * n + 1)};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(float(sums[2 * h]) * (factors[0] * scale[h]) + shift[h],
                                                        float(sums[2 * h + 1]) * (factors[1] * scale[h]) + shift[h]);
      pairs[h] = transpose(reinterpret_cast<const uint32_t&>(pair));
    }
    // Even lanes store outputs 0 … 7, odd lanes outputs 8 … 15.
    const bool odd = t % 2;
    const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? pairs[0] : pairs[1], 1);
    if (r >= a.rows) return;
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.out) + r * a.out_stride + first) =
        odd ? uint2{received, pairs[1]} : uint2{pairs[0], received};
  }
  __device__ void store_each(const Sum (&sums)[4], int n) const {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int r = row + 8 * n + c;
      if (r >= a.rows) continue;
      const float factor = row_scale(r);
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (output + 8 * h < a.out_features)
          localllm::cuda::store(a, r * a.out_stride + output + 8 * h, float(sums[2 * h + c]) * (factor * scale[h]) + shift[h]);
    }
  }
};

// Adds the sums of the blocks of a cluster through their shared memory, in the order of the chunks. Each block stores a
// share of the rows. The ring buffer has the sums; the blocks have no other tile. All threads of the cluster call
// cluster_sync twice.
template <class S, class Sum>
__device__ inline void store_in_cluster(const Tiled& a, const Sum (&sums)[S::N][1][4], int tile, char* ring, int warp,
                                        int lane) {
  auto* parts = reinterpret_cast<float4*>(ring) + threadIdx.x;
  S::sync();  // the other warpgroup has read its operands
#pragma unroll
  for (int n = 0; n < S::N; n++)
    parts[n * S::THREADS] = {bits(sums[n][0][0]), bits(sums[n][0][1]), bits(sums[n][0][2]), bits(sums[n][0][3])};
  hopper::cluster_sync();
  const float4* others[MAX_SPLIT];
#pragma unroll
  for (int r = 0; r < MAX_SPLIT; r++) others[r] = hopper::in_cluster(parts, min(r, a.split - 1));
  const OutputStore<S, Sum> outputs(a, tile, warp, lane);
  const int rank = int(blockIdx.x) % a.split, end = S::N * (rank + 1) / a.split;
  const bool is_complete = outputs.is_complete();
#pragma unroll 2
  for (int n = S::N * rank / a.split; n < end; n++) {
    Sum added[4] = {};
#pragma unroll
    for (int r = 0; r < MAX_SPLIT; r++) {
      const float4 part = r < a.split ? others[r][n * S::THREADS] : float4{};
      added[0] += sum_of_bits<Sum>(part.x);
      added[1] += sum_of_bits<Sum>(part.y);
      added[2] += sum_of_bits<Sum>(part.z);
      added[3] += sum_of_bits<Sum>(part.w);
    }
    is_complete ? outputs.store_rows(added, n) : outputs.store_each(added, n);
  }
  hopper::cluster_sync();  // the other blocks have read the parts
}

template <class S>
__device__ inline void consume(const Tiled& a, const HopperRing<S>& ring, const Schedule& schedule) {
  using F = typename S::Format;
  using Sum = typename F::Sum;
  constexpr bool GROUPED = F::RECORDS > 0, IN_SHARED = F::X_BYTES == 1 && F::WEIGHT_BYTES == 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  HopperConsumer<S> consumer{ring, warp, lane};
  Sum sums[S::N][1][4];
  [[maybe_unused]] HopperOperands<std::conditional_t<IN_SHARED, TiledFp8<false>, F>> operands[2];
  Iteration at = schedule.start();
  const int count = schedule.count();
  for (int i = 0, size = 0; i < count; i += size) {
    size = min(a.chunks - at.chunk, count - i);  // chunks of this tile
    // Also for formats whose first wgmma could ignore the sums: the assembler of CUDA 12.8 would serialise their wgmma.
#pragma unroll
    for (int n = 0; n < S::N; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[n][0][j] = 0;
    if constexpr (GROUPED) consumer.multiply_groups(sums, size);
    for (int chunk = 0; !GROUPED && chunk < size; chunk++) {
      if constexpr (IN_SHARED) consumer.multiply_shared(sums);
      else if constexpr (!GROUPED) consumer.multiply_unpacked(sums, operands);
    }
    if constexpr (!GROUPED) consumer.finish(sums);
    if (a.split > 1) {
      store_in_cluster<S>(a, sums, at.tile, ring.slots, warp, lane);
      return;
    }
    const int2 blocks = schedule.blocks_of(at.tile);
    if (blocks.x == blocks.y || add_parts<S>(a, sums, blocks.x, blocks.y)) {
      const OutputStore<S, Sum> outputs(a, at.tile, warp, lane);
      if (outputs.is_complete()) {
#pragma unroll
        for (int n = 0; n < S::N; n++) outputs.store_rows(sums[n][0], n);
      } else {
#pragma unroll
        for (int n = 0; n < S::N; n++) outputs.store_each(sums[n][0], n);
      }
    }
    at.chunk += size - 1;
    schedule.advance(at);
  }
}

#endif

// The kernel is empty on GPUs other than Hopper; no op starts it there.
template <class S>
__global__ void __launch_bounds__(3 * S::WARPGROUP, 1)
    tiled_hopper(const __grid_constant__ HopperMaps maps, const __grid_constant__ Tiled a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  const HopperRing<S> ring(memory);
  if (threadIdx.x == 0) ring.initialise();
  __syncthreads();
  launch_dependents();
  const Schedule schedule(a);
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / S::WARPGROUP, 0);
  if (warpgroup == 2) {
    hopper::decrease_registers<40>();
    if (threadIdx.x % S::WARPGROUP == 0) produce(a, maps, ring, schedule);
    for (int i = 0; a.split > 1 && i < 2; i++) hopper::cluster_sync();  // see store_in_cluster
  } else {
    hopper::increase_registers<232>();
    wait_for_previous();
    consume(a, ring, schedule);
  }
#endif
}

}  // namespace localllm::cuda
