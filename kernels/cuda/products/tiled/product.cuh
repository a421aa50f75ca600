// The tiled kernel of each weight format, by the number of rows.
#pragma once

#include "launch.cuh"

namespace localllm::cuda {

// The order of inputs in which a Hopper kernel reads activations.
template <class F>
constexpr InputOrder HOPPER_ORDER = F::WEIGHT_BYTES == 64 ? F::X_BYTES == 1 ? InputOrder::even_first : InputOrder::nibbles
                                    : F::X_BYTES == 1     ? InputOrder::natural
                                                          : InputOrder::pairs;

constexpr int64_t MMA_ROWS = 16;  // rows that mma.sync multiplies faster than wgmma

// True if the kernels of Hopper multiply this number of rows on this GPU.
static inline bool uses_hopper_kernels(int64_t rows) {
#ifdef LOCALLLM_HOPPER
  return rows > MMA_ROWS && gpu().major == 9 && gpu().shared_limit >= HOPPER_SHARED;
#else
  return false;
#endif
}

// Calls `call` with the kernel of Hopper for this number of rows.
template <class F, class Call>
static inline auto with_hopper_kernel(int64_t rows, Call&& call) {
  constexpr int64_t MAX_NARROW_ROWS = F::X_BYTES == 1 ? 256 : 128;
  if (rows <= 32) return call(HopperKernel<F, 4>{});
  if constexpr (F::ROUNDED_IN_GROUPS) return call(HopperKernel<F, 8>{});
  else if (rows <= 64) return call(HopperKernel<F, 8>{});
  else if constexpr (F::RECORDS > 0) return call(HopperKernel<F, 16>{});
  else return rows <= MAX_NARROW_ROWS ? call(HopperKernel<F, 16>{}) : call(HopperKernel<F, 32>{});
}

// Calls `call` with the kernel with mma.sync, for GPUs other than Hopper, for this number of rows.
template <class F, class Call>
static inline auto with_mma_kernel(int64_t rows, Call&& call) {
  if (rows <= 16) return call(TiledKernel<F, 1, 4, 1, 4, 3>{});
  if (rows <= 32) return call(TiledKernel<F, 2, 4, 1, 4, 2>{});
  // A format that scales the sums of each group needs registers for these sums.
  if constexpr (F::X_BYTES == 2 && F::RECORDS > 0) return call(TiledKernel<F, 2, 4, 2, 4, 1>{});
  else if (rows <= 64) return call(TiledKernel<F, 4, 4, 1, 4, 2>{});
  else return call(TiledKernel<F, 4, 4, 2, 4, 1>{});
}

// Calls `call` with the kernel for this number of rows on this GPU.
template <class F, class Call>
static inline auto with_kernel(int64_t rows, Call&& call) {
  if constexpr (std::is_same_v<F, HopperFp8>) return with_hopper_kernel<F>(rows, call);
#ifdef LOCALLLM_HOPPER
  else if (uses_hopper_kernels(rows)) return with_hopper_kernel<F>(rows, call);
#endif
  else return with_mma_kernel<F>(rows, call);
}

// True if a separate kernel prepares the activations.
template <class F>
bool arranged(const ProductArgs& args) {
  return F::ROUNDED || uses_hopper_kernels(args.rows);
}

template <class F>
int64_t tiled_shared_of(const ProductArgs& args) {
  return with_kernel<F>(args.rows, [&](auto kernel) {
    return memory_of<decltype(kernel)>(tiled_arguments<F>(args), arranged<F>(args)).bytes();
  });
}

template <class F>
void tiled_product_of(const ProductArgs& args, int32_t* arrivals, cudaStream_t stream) {
  const InputOrder order = uses_hopper_kernels(args.rows)                ? HOPPER_ORDER<F>
                           : F::WEIGHT_BYTES == 64 && F::X_BYTES == 1 ? InputOrder::even_first
                                                                     : InputOrder::natural;
  with_kernel<F>(args.rows, [&](auto kernel) {
    start_product<decltype(kernel)>(args, arranged<F>(args), order, arrivals, stream);
  });
}

#define TILED_FORMAT(FORMAT)                                    \
  template int64_t tiled_shared_of<FORMAT>(const ProductArgs&); \
  template void tiled_product_of<FORMAT>(const ProductArgs&, int32_t*, cudaStream_t);

}  // namespace localllm::cuda
