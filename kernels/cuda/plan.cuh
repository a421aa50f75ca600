// How a product of few rows is cut, from its shape and the GPU alone.
#pragma once

#include <algorithm>

#include "formats.cuh"

namespace localllm::cuda {

constexpr int OWN_LIMIT = 32 << 10;  // bytes of activations that every block may make ready for itself
constexpr int BUDGET = 110 << 10;    // bytes of shared memory: the next kernel's begin while this one's still run

// Blocks of 8 outputs to a tile, 4, 2 or 1: as many as leave no more than a tenth of the multiprocessors without work.
static inline int outputs_of_tile(int64_t blocks, bool gated) {
  auto busy = [&](int64_t each) {
    int64_t tiles = (blocks + each - 1) / each, turns = (tiles + gpu().processors - 1) / gpu().processors;
    return double(blocks) / double(turns * gpu().processors * each);
  };
  double best = std::max({busy(4), busy(2), gated ? 0.0 : busy(1)});
  if (busy(4) >= 0.9 * best) return 4;
  return busy(2) >= 0.9 * best || gated ? 2 : 1;
}

template <class F>
static inline int own_pitch(const FewRows& a) {
  int64_t chunks = (a.row_bytes + 63) / 64, pitch = chunks * F::CHUNK * int64_t(sizeof(typename F::X)) + 16;
  bool groups = !F::ROUNDED_IN_GROUPS || a.group == 32 || a.group == 64 || a.group == 128;
  int rows = a.rows == 1 ? 1 : a.rows == 2 ? 2 : a.rows <= 4 ? 4 : 8;
  bool held = chunks * F::CHUNK <= HELD * 8 * THREADS / rows;
  return a.rows <= 8 && groups && held && a.rows * pitch <= OWN_LIMIT ? int(pitch) : 0;
}

// False where this GPU has too little shared memory for it.
template <class F, int J, int P, int NT>
static inline bool start_few_rows(FewRows a, cudaStream_t stream) {
  int table = WARPS * J * a.rows * 8 * 4, own = 0;
  a.slot_bytes = THREADS * J * P * (16 + 4 * F::RECORDS);
  if (a.own_pitch)
    own = a.rows * (a.own_pitch + 4) + (F::ROUNDED_IN_GROUPS ? a.rows * a.subs * 4 : 0);
  else
    a.slot_bytes += THREADS * P * NT * (F::PIECES * 8 * int(sizeof(typename F::X)) +
                                        (F::ROUNDED_IN_GROUPS ? 4 * F::RECORDS : 0));
  a.tables = table <= 8 << 10 ? 2 : 1;
  int limit = gpu().shared_limit - 1024, others = a.tables * table + own;
  int room = std::min(limit, F::RECORDS == 0 ? BUDGET : limit) - others;
  if (room < 3 * a.slot_bytes) room = limit - others;
  a.slots = std::min(MAX_SLOTS, room / a.slot_bytes);
  if (a.slots < 2) return false;
  int shared = a.slots * a.slot_bytes + others;
  auto kernel = few_rows<F, J, P, NT>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  int64_t tiles = (a.outs + 8 * J - 1) / (8 * J);
  launch_early(kernel, std::min<int64_t>(tiles, gpu().processors), THREADS, shared, stream, a);
  check_launch("linear");
  return true;
}

template <class F, int NT>
static inline bool start_tiles(const FewRows& a, cudaStream_t stream) {
  constexpr int P = NT == 1 && F::PIECES < 4 ? 2 : 1;
  int each = outputs_of_tile((a.outs + 7) / 8, a.gated > 0);
  constexpr bool heavy = F::PIECES * sizeof(typename F::X) == 8;  // its activations take the registers of larger tiles
  if constexpr (F::RECORDS <= 1 && !heavy) {  // and small groups are rare: one cut for all shapes
    if (each == 4 && start_few_rows<F, 4, 1, NT>(a, stream)) return true;
    if (each == 1 && start_few_rows<F, 1, P, NT>(a, stream)) return true;
  }
  return start_few_rows<F, 2, 1, NT>(a, stream);
}

// a.own_pitch is 0 or what own_pitch gave.
template <class F>
static inline void start_few_rows(const FewRows& a, cudaStream_t stream) {
  if (!(a.rows <= 8 ? start_tiles<F, 1>(a, stream) : start_tiles<F, 2>(a, stream)))
    throw std::runtime_error("linear: this GPU has too little shared memory for a product of few rows");
}

}  // namespace localllm::cuda
