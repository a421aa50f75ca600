// Starts the small-batch kernel with the tile sizes that plan.h chose.
#pragma once

#include "formats.cuh"

namespace localllm::cuda {

static inline Limits limits() { return {gpu().processors, gpu().shared_limit}; }

static inline Shape shape_of(const SmallBatch& a) {
  return {a.rows, a.out_features, a.subgroups, a.group, a.row_bytes, a.gated > 0};
}

// The arguments for rows first … first + count - 1.
template <class F>
static inline SmallBatch rows_of(SmallBatch a, int first, int count) {
  auto advance = [](const void* from, int64_t bytes) {
    return from ? const_cast<char*>(static_cast<const char*>(from)) + bytes : nullptr;
  };
  const int64_t stream_bytes = int64_t(first) * a.in_features * 2;
  a.rows = count;
  a.lora.first += first;
  a.out = advance(a.out, first * a.out_stride * size_of(a.out_type));
  a.x = advance(a.x, first * a.x_stride * (a.prepared_pitch ? 2 : sizeof(typename F::X)));
  a.stream = advance(a.stream, stream_bytes);
  a.stream_out = advance(a.stream_out, stream_bytes);
  if (a.row_scale) a.row_scale += first;
  if (a.subgroup_scale) a.subgroup_scale += first * a.subgroups;
  return a;
}

template <class F, int J, int P, int NT, bool LORA>
static inline void start_small_batch(SmallBatch a, const TileSizes& sizes, cudaStream_t stream) {
  static_assert(F::TRAITS.x_bytes == sizeof(typename F::X), "TRAITS and X disagree");
  a.slot_bytes = sizes.slot_bytes;
  a.slots = sizes.slots;
  a.sum_buffers = sizes.sum_buffers;
  auto kernel = small_batch<F, J, P, NT, LORA>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizes.shared);
  int64_t tiles = (a.out_features + 8 * J - 1) / (8 * J);
  launch_early(kernel, std::min<int64_t>(tiles, gpu().processors), THREADS, sizes.shared, stream, a);
  check_launch("linear");
}

template <class F, int NT, bool LORA>
static inline void start_tiles(const SmallBatch& a, const TileSizes& sizes, cudaStream_t stream) {
  if constexpr (F::TRAITS.many_tiles())
    if (sizes.j == 4) return start_small_batch<F, 4, 1, NT, LORA>(a, sizes, stream);
  if (sizes.j == 2) return start_small_batch<F, 2, 1, NT, LORA>(a, sizes, stream);
  start_small_batch<F, 1, F::TRAITS.depth(NT), NT, LORA>(a, sizes, stream);
}

// a.prepared_pitch is the result of prepared_pitch(…).
template <class F, bool LORA>
static inline void start_small_batch(const SmallBatch& a, cudaStream_t stream) {
  Limits available = limits();
  if (LORA) available.shared -= (MAX_LORA_INNER + MAX_LORA_ROWS) * int(sizeof(float));  // static shared memory of the kernel
  const int launch_rows = rows_per_launch(F::TRAITS, shape_of(a), a.prepared_pitch, available);
  if (!launch_rows) throw std::runtime_error("linear: this GPU has too little shared memory for this shape");
  for (int first = 0; first < a.rows; first += launch_rows) {
    SmallBatch batch = rows_of<F>(a, first, std::min(launch_rows, a.rows - first));
    TileSizes sizes = tile_sizes(F::TRAITS, shape_of(batch), batch.prepared_pitch, available);
    sizes.nt == 1 ? start_tiles<F, 1, LORA>(batch, sizes, stream) : start_tiles<F, 2, LORA>(batch, sizes, stream);
  }
}

}  // namespace localllm::cuda
