// Starts the few-rows kernel with the tile sizes that few_rows_plan.h chose.
#pragma once

#include "formats.cuh"

namespace localllm::cuda {

static inline Limits limits() { return {gpu().processors, gpu().shared_limit}; }

static inline Shape shape_of(const FewRows& a) {
  return {a.rows, a.outs, a.subs, a.group, a.row_bytes, a.gated > 0};
}

// The arguments for rows first … first + count - 1.
template <class F>
static inline FewRows rows_of(FewRows a, int first, int count) {
  auto behind = [](const void* from, int64_t bytes) {
    return from ? const_cast<char*>(static_cast<const char*>(from)) + bytes : nullptr;
  };
  const int64_t summed = int64_t(first) * a.ins * 2;
  a.rows = count;
  a.out = behind(a.out, first * a.out_stride * size_of(a.out_type));
  a.x = behind(a.x, first * a.x_stride * (a.own_pitch ? 2 : sizeof(typename F::X)));
  a.stream = behind(a.stream, summed), a.stream_out = behind(a.stream_out, summed);
  if (a.row_scale) a.row_scale += first;
  if (a.sub_scale) a.sub_scale += first * a.subs;
  return a;
}

template <class F, int J, int P, int NT>
static inline void start_few_rows(FewRows a, const Cut& cut, cudaStream_t stream) {
  static_assert(F::TRAITS.x_bytes == sizeof(typename F::X), "TRAITS and X disagree");
  a.slot_bytes = cut.slot_bytes, a.slots = cut.slots, a.tables = cut.tables;
  auto kernel = few_rows<F, J, P, NT>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, cut.shared);
  int64_t tiles = (a.outs + 8 * J - 1) / (8 * J);
  launch_early(kernel, std::min<int64_t>(tiles, gpu().processors), THREADS, cut.shared, stream, a);
  check_launch("linear");
}

template <class F, int NT>
static inline void start_tiles(const FewRows& a, const Cut& cut, cudaStream_t stream) {
  if constexpr (F::TRAITS.many_tiles())
    if (cut.j == 4) return start_few_rows<F, 4, 1, NT>(a, cut, stream);
  if (cut.j == 2) return start_few_rows<F, 2, 1, NT>(a, cut, stream);
  start_few_rows<F, 1, F::TRAITS.depth(NT), NT>(a, cut, stream);
}

// a.own_pitch is the result of own_pitch(…).
template <class F>
static inline void start_few_rows(const FewRows& a, cudaStream_t stream) {
  const int at_once = rows_at_once(F::TRAITS, shape_of(a), a.own_pitch, limits());
  if (!at_once) throw std::runtime_error("linear: this GPU has too little shared memory for this shape");
  for (int first = 0; first < a.rows; first += at_once) {
    FewRows part = rows_of<F>(a, first, std::min(at_once, a.rows - first));
    Cut cut = cut_of(F::TRAITS, shape_of(part), part.own_pitch, limits());
    cut.nt == 1 ? start_tiles<F, 1>(part, cut, stream) : start_tiles<F, 2>(part, cut, stream);
  }
}

}  // namespace localllm::cuda
