// Prefill attention with mma.sync: the copies of keys and values to shared memory.
#pragma once

#include "prefill_mma_tile.cuh"

namespace localllm::cuda {
namespace {

// Starts an asynchronous copy of 16 bytes to shared memory; zeros if not `valid`.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ inline void widen_eight(uint32_t to, uint32_t first, uint32_t second) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(widen_two(first & 0xffff)),
               "r"(widen_two(first >> 16)), "r"(widen_two(second & 0xffff)), "r"(widen_two(second >> 16))
               : "memory");
}

constexpr bool KEYS = false, VALUES = true;

// Copies keys and values of one kv head from the pages to shared memory.
template <class S, class C>
struct Loader {
  using Sizes = Copies<S, C>;
  static constexpr bool WIDENED = Shared<S, C>::WIDENED;
  const PrefillArgs& args;
  Shared<S, C>& shared;
  const Tile& tile;

  struct Slots {
    int numbers[Sizes::EIGHTS];
  };

  static __device__ int position(int thread, int group) {
    return (thread / 32 / Sizes::SHARING + group * S::WARPS) * 8 + thread % 32 / 4;
  }
  static __device__ int column(int thread, int pass) {
    return (pass * Sizes::SHARING + thread / 32 % Sizes::SHARING) * 4 + thread % 4;
  }

  // The slots of the thread's positions in a block; -1 if no query sees the position.
  __device__ Slots slots_of(int block) const {
    const int thread = thread_index<S>();
    Slots slots;
#pragma unroll
    for (int group = 0; group < Sizes::EIGHTS; group++) {
      const int index = block * S::BLOCK + position(thread, group), page_column = index >> args.page_shift;
      slots.numbers[group] = -1;
      if (index < tile.low || index >= tile.end || page_column >= args.columns) continue;
      const int page = args.page_table[tile.row * args.table_row + page_column];
      const int slot = (page << args.page_shift) + (index & (args.page_size - 1));
      if (page >= 0 && slot < args.slots) slots.numbers[group] = slot;
    }
    return slots;
  }

  // Starts the copies of a block of keys or values.
  template <bool OF_VALUES>
  __device__ void start(const Slots& slots) const {
    const int thread = thread_index<S>();
    const int first = tile.kv_head * int(args.head) + column(thread, 0) * Sizes::ELEMENTS;
    const Lane<S::DIM> target(OF_VALUES ? shared.values : shared.keys, position(thread, 0), column(thread, 0));
    const uint32_t narrow_target = shared_address(shared.narrow[WIDENED && OF_VALUES]) + thread * 16;
#pragma unroll
    for (int group = 0; group < Sizes::EIGHTS; group++) {
      const int slot = slots.numbers[group];
      const C* pages = static_cast<const C*>(OF_VALUES ? args.values : args.keys);
      const C* from = pages + int64_t(max(slot, 0)) * int(args.slot) + first;
#pragma unroll
      for (int pass = 0; pass < Sizes::COLUMNS; pass++) {
        if (!Sizes::ALL_COLUMNS && column(thread, pass) >= Sizes::ROW_COPIES) continue;
        uint32_t to = target.address(group * 8 * S::WARPS, 2 * pass * Sizes::SHARING);
        if constexpr (WIDENED) to = narrow_target + (group * Sizes::COLUMNS + pass) * S::THREADS * 16;
        copy_async(to, from + pass * Sizes::SHARING * 4 * Sizes::ELEMENTS, slot >= 0);
      }
    }
  }

  // Converts the elements that this thread has copied.
  template <bool OF_VALUES>
  __device__ void widen() const {
    const int thread = thread_index<S>();
    const Lane<S::DIM> target(OF_VALUES ? shared.values : shared.keys, position(thread, 0), 2 * column(thread, 0));
#pragma unroll
    for (int group = 0; group < Sizes::EIGHTS; group++)
#pragma unroll
      for (int pass = 0; pass < Sizes::COLUMNS; pass++) {
        if (!Sizes::ALL_COLUMNS && column(thread, pass) >= Sizes::ROW_COPIES) continue;
        const uint4 from = shared.narrow[OF_VALUES][(group * Sizes::COLUMNS + pass) * S::THREADS + thread];
        const uint32_t to = target.address(group * 8 * S::WARPS, 4 * pass * Sizes::SHARING);
        widen_eight(to, from.x, from.y);
        widen_eight(to ^ 16, from.z, from.w);
      }
  }
};

}  // namespace
}  // namespace localllm::cuda
