// The tiled kernel (tiled.cuh) for Hopper (sm_90a), with wgmma and TMA copies.
//
// A tile is 128 outputs times 8 * N rows. Weights are operand A of wgmma and activations operand B, so that few rows
// need few columns. A producer warp copies chunks of 128 inputs to a ring buffer; two consumer warpgroups multiply 64
// outputs each. They unpack weights in registers; int8 weights stay in shared memory. Warpgroups have no common
// barrier, so one unpacks or scales while the tensor cores multiply for the other.
//
// The order of the inputs in a row of activations is the order in which a lane unpacks weights (round_rows.cu).
#pragma once

#include "hopper_products.cuh"
#include "tensor_map.h"
#include "tiled.cuh"

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
  // Offsets in a slot of the ring.
  static constexpr int WEIGHT = PANEL * F::X_BYTES, RECORDS = WEIGHT + OUTPUTS * F::WEIGHT_BYTES;
  static constexpr int ROW_SCALES = RECORDS + OUTPUTS * F::RECORDS * 4;
  static constexpr int BYTES = ROW_SCALES + (F::ROUNDED_IN_GROUPS ? ROWS * F::RECORDS * 4 : 0);
  static constexpr int SLOT = (BYTES + hopper::ATOM - 1) / hopper::ATOM * hopper::ATOM;
  static constexpr int SLOTS = SLOT * 8 < (200 << 10) ? 8 : (200 << 10) / SLOT;
  static constexpr int SHARED = SLOTS * SLOT + 2 * SLOTS * 8 + hopper::ATOM;
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
  __device__ void copy_weights(const Tiled& a, const HopperMaps& maps, const Iteration& at, int index) const {
    char* to = slots + index * S::SLOT;
    const int first = at.tile / a.row_tiles * S::OUTPUTS;
    hopper::arrive_expecting(full[index], S::BYTES);
    hopper::copy_box(to + S::WEIGHT, maps.weight, full[index], at.chunk * F::WEIGHT_BYTES, first, 0);
    if constexpr (F::RECORDS > 0 && S::RECORDS_AT_ONCE)
      hopper::copy_box(to + S::RECORDS, maps.records, full[index], 0, at.chunk * F::RECORDS, first / 8);
    if constexpr (F::RECORDS > 0 && !S::RECORDS_AT_ONCE)
      for (int r = 0; r < F::RECORDS; r++)
        hopper::copy_box(to + S::RECORDS + r * S::OUTPUTS * 4, maps.records, full[index], 0,
                         (at.chunk * F::RECORDS + r) / a.records_per_subgroup, first / 8);
  }
  __device__ void copy_rows(const Tiled& a, const HopperMaps& maps, const Iteration& at, int index) const {
    char* to = slots + index * S::SLOT;
    const int first = at.tile % a.row_tiles * S::ROWS;
    for (int panel = 0; panel < F::X_BYTES; panel++)
      hopper::copy_box(to + panel * S::PANEL, maps.x, full[index], (at.chunk * F::X_BYTES + panel) * 128, first, 0);
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
  const int count = schedule.count(), first = min(count, S::SLOTS);
  Iteration at = schedule.start(), next = at;
  if (!a.resident) wait_for_previous();
  for (int i = 0; i < first; i++) {
    ring.copy_weights(a, maps, next, i);
    schedule.advance(next);
  }
  if (a.resident) wait_for_previous();
  for (int i = 0; i < first; i++) {
    ring.copy_rows(a, maps, at, i);
    schedule.advance(at);
  }
  HopperSlot<S::SLOTS> slot;
  for (int i = first; i < count; i++, slot.advance()) {
    hopper::wait_barrier(ring.empty[slot.index], slot.parity);
    ring.copy_weights(a, maps, at, slot.index);
    ring.copy_rows(a, maps, at, slot.index);
    schedule.advance(at);
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
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        const uint32_t word = shared_word(weight + (g + 8 * h) * 64 + t * 16 + (p * STEPS + k) * 4);
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
#pragma unroll
      for (int k = 0; k < STEPS; k += 2) {
        const uint32_t word = shared_word(weight + (g + 8 * h) * 64 + t * 16 + (p * STEPS + k) * 2);
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
  __device__ void load(uint32_t weight, uint32_t records, int p, int lane) {
    const int g = lane / 4, row = lane % 16;
#pragma unroll
    for (int h = 0; h < 2; h++)
      if constexpr (GROUPED)
        scale[h] = __uint_as_float(shared_word(records + p * 128 * 4 + h * 32 + g * 4));
#pragma unroll
    for (int k = 0; k < STEPS; k += 2) {
      uint32_t words[4];  // outputs g and g + 8 of 16 inputs, then of the next 16 inputs
      const int unit = p * STEPS + k + lane / 16;
      load_matrices(words, weight + row * 128 + (unit ^ (row & 7)) * 16);
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
  int pending = -1;  // slot that wgmma still reads; -1: none

  // Bytes from the start of a slot to the descriptor of step `k` of the activations.
  static __device__ int step_offset(int k) { return k / 4 * S::PANEL + k % 4 * 32; }

  // int8 weights: operand A is in shared memory.
  __device__ void multiply_shared(Sum (&sums)[N][1][4], bool adding) {
    const char* from = ring.slots + slot.index * S::SLOT;
    const uint64_t x = hopper::descriptor(from, hopper::ATOM, 16);
    const uint64_t weight = hopper::descriptor(from + S::WEIGHT + warp / 4 * 64 * 128, hopper::ATOM, 16);
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
      hopper::multiply_int8<N>(sums, hopper::advance_descriptor(weight, 32 * k), hopper::advance_descriptor(x, 32 * k),
                               adding || k > 0);
    hopper::wgmma_commit();
    hopper::wgmma_wait<1>();
    if (pending >= 0) ring.release(pending, lane);
    pending = slot.index;
  }
  // Weights that are unpacked and have one scale per output. The operands of one half of a chunk are unpacked while
  // wgmma reads those of the other half.
  __device__ void multiply_unpacked(Sum (&sums)[N][1][4], HopperOperands<F> (&operands)[2], bool adding) {
    const char* from = ring.slots + slot.index * S::SLOT;
    const uint64_t x = hopper::descriptor(from, hopper::ATOM, 16);
    const uint32_t weight = hopper::address(from + S::WEIGHT) + warp * 16 * F::WEIGHT_BYTES;
#pragma unroll
    for (int p = 0; p < 2; p++) {
      hopper::wgmma_wait<1>();
      fence_operands(operands[p].a);
      if (p == 1 && pending >= 0) ring.release(pending, lane);
      operands[p].load(weight, 0, p, lane);
      fence_operands(operands[p].a);
      hopper::wgmma_fence();
#pragma unroll
      for (int k = 0; k < HopperOperands<F>::STEPS; k++)
        multiply_registers<N>(sums, operands[p].a[k],
                              hopper::advance_descriptor(x, step_offset(p * HopperOperands<F>::STEPS + k)),
                              adding || p > 0 || k > 0);
      hopper::wgmma_commit();
    }
    pending = slot.index;
  }
  // Weights with groups: the products of a group are scaled and added.
  __device__ void multiply_groups(Sum (&sums)[N][1][4]) {
    using Operands = HopperOperands<F>;
    const char* from = ring.slots + slot.index * S::SLOT;
    const uint64_t x = hopper::descriptor(from, hopper::ATOM, 16);
    const uint32_t weight = hopper::address(from + S::WEIGHT) + warp * 16 * F::WEIGHT_BYTES;
    const uint32_t records = hopper::address(from + S::RECORDS) + warp * 2 * 32 * (S::RECORDS_AT_ONCE ? F::RECORDS : 1);
    const uint32_t row_scales = hopper::address(from + S::ROW_SCALES) + lane % 4 * 8;
#pragma unroll
    for (int p = 0; p < Operands::GROUPS; p++) {
      Operands operands;
      typename Operands::Product products[N][1][4];
      operands.load(weight, records, p, lane);
      fence_operands(operands.a);
      fence_sums(products);
      hopper::wgmma_fence();
#pragma unroll
      for (int k = 0; k < Operands::STEPS; k++)
        multiply_registers<N>(products, operands.a[k], hopper::advance_descriptor(x, step_offset(p * Operands::STEPS + k)),
                              k > 0);
      hopper::wgmma_commit();
      hopper::wgmma_wait<0>();
      fence_sums(products);
      fence_operands(operands.a);
#pragma unroll
      for (int n = 0; n < N; n++) {
        float2 row_scale{1.0f, 1.0f};
        if constexpr (F::ROUNDED_IN_GROUPS) {
          const uint2 bits = shared_words2(row_scales + (p * S::ROWS + 8 * n) * 4);
          row_scale = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
          sums[n][0][i] += float(products[n][0][i]) * (operands.scale[i / 2] * (i % 2 ? row_scale.y : row_scale.x));
      }
    }
    __syncwarp();
    ring.release(slot.index, lane);
  }
  // Waits until wgmma has ended, before the sums are read.
  __device__ void finish(Sum (&sums)[N][1][4]) {
    hopper::wgmma_wait<0>();
    fence_sums(sums);
    if (pending >= 0) ring.release(pending, lane);
    pending = -1;
  }
};

// Stores the sums of a lane. `row`, `output`: those of its first sum.
template <class S, class Sum>
__device__ inline void store_outputs(const Tiled& a, const Sum (&sums)[S::N][1][4], int row, int output) {
  using F = typename S::Format;
  float scale[2] = {1.0f, 1.0f}, shift[2] = {};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int column = output + 8 * h;
    if (column >= a.out_features) continue;
    if (a.scale) scale[h] = __ldg(a.scale + column);
    if (a.bias) shift[h] = read_only(a.bias_type, a.bias, column);
  }
  int64_t index = row * a.out_stride + output;
#pragma unroll
  for (int n = 0; n < S::N; n++) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int r = row + 8 * n + c;
      if (r >= a.rows) continue;
      const float row_scale = F::ROUNDED && !F::ROUNDED_IN_GROUPS ? __ldg(a.row_scale + r) : 1.0f;
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (output + 8 * h < a.out_features)
          store(a, index + c * a.out_stride + 8 * h,
                float(sums[n][0][2 * h + c]) * (row_scale * scale[h]) + shift[h]);
    }
    index += 8 * a.out_stride;
  }
}

template <class S>
__device__ inline void consume(const Tiled& a, const HopperRing<S>& ring, const Schedule& schedule) {
  using F = typename S::Format;
  using Sum = typename F::Sum;
  constexpr bool GROUPED = F::RECORDS > 0, IN_SHARED = std::is_same_v<F, TiledInt8>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  HopperConsumer<S> consumer{ring, warp, lane};
  Sum sums[S::N][1][4];
  [[maybe_unused]] HopperOperands<std::conditional_t<IN_SHARED, TiledFp8<false>, F>> operands[2];
  Iteration at = schedule.start();
  const int count = schedule.count();
  for (int i = 0, size = 0; i < count; i += size) {
    size = min(a.chunks - at.chunk, count - i);  // chunks of this tile
    if constexpr (GROUPED) {
#pragma unroll
      for (int n = 0; n < S::N; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[n][0][j] = 0;
    }
    for (int chunk = 0; chunk < size; chunk++) {
      hopper::wait_barrier(ring.full[consumer.slot.index], consumer.slot.parity);
      if constexpr (IN_SHARED) consumer.multiply_shared(sums, chunk > 0);
      else if constexpr (GROUPED) consumer.multiply_groups(sums);
      else consumer.multiply_unpacked(sums, operands, chunk > 0);
      consumer.slot.advance();
    }
    if constexpr (!GROUPED) consumer.finish(sums);
    const int2 blocks = schedule.blocks_of(at.tile);
    if (blocks.x == blocks.y || add_parts<S>(a, sums, blocks.x, blocks.y))
      store_outputs<S>(a, sums, at.tile % a.row_tiles * S::ROWS + lane % 4 * 2,
                       at.tile / a.row_tiles * S::OUTPUTS + warp * 16 + lane / 4);
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
  } else {
    hopper::increase_registers<232>();
    wait_for_previous();
    consume(a, ring, schedule);
  }
#endif
}

}  // namespace localllm::cuda
