// Wrappers of Hopper's instructions (sm_90a): TMA copies, transaction barriers (mbarrier) and wgmma.
//
// Tiles in shared memory have the layout of TMA copies with 128-byte swizzle and start at multiples of 1024 bytes. A
// row of a tile is 64 values of 16 bits; eight rows are a swizzle atom. Requires __CUDA_ARCH_FEAT_SM90_ALL.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace localllm::cuda::hopper {

constexpr int ATOM = 1024;  // bytes of a swizzle atom

__device__ inline uint32_t address(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

// Initialises an mbarrier. A phase ends after `count` arrivals and after all expected bytes have been written.
__device__ inline void init(uint64_t& barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(count));
}
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}
__device__ inline void arrive_expecting(uint64_t& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes)
               : "memory");
}
// Waits until the phase with this parity has ended. The phase before the first one has parity 1 and has ended.
__device__ inline void wait_barrier(uint64_t& barrier, int parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address(&barrier)), "r"(parity)
        : "memory");
}

// Named barriers for a subset of a block's threads.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes this thread's writes to shared memory visible to the async proxy (TMA copies and wgmma) after a barrier.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Changes the registers per thread of this warpgroup.
template <int REGISTERS>
__device__ inline void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Starts a TMA copy of the box whose first element has these coordinates. Elements outside the tensor become zeros.
__device__ inline void copy_box(void* to, const CUtensorMap& map, uint64_t& barrier, int x0, int x1, int x2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(address(to)),
      "l"(&map), "r"(address(&barrier)), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ inline void copy_box(void* to, const CUtensorMap& map, uint64_t& barrier, int x0, int x1, int x2, int x3,
                                int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(address(to)),
      "l"(&map), "r"(address(&barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

// A barrier of all threads of the cluster. Writes to shared memory before it are visible after it.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
// The address in the block `rank` of the cluster that corresponds to `local` in the shared memory of this block.
template <class T>
__device__ inline const T* in_cluster(const T* local, int rank) {
  const T* other;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(local), "r"(rank));
  return other;
}

// The wgmma matrix descriptor of a tile. `down`: bytes between groups of 8 rows (stride byte offset). `across`: bytes
// between groups of 64 columns (leading byte offset), which wgmma reads only if the reduction runs over the rows.
__device__ inline uint64_t descriptor(const void* from, int down, int across) {
  return uint64_t((address(from) & 0x3ffff) >> 4) | uint64_t(across >> 4) << 16 | uint64_t(down >> 4) << 32 |
         uint64_t(1) << 62;
}
__device__ inline uint64_t advance_descriptor(uint64_t from, int bytes) { return from + (bytes >> 4); }

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// A compiler barrier: the compiler does not move reads or writes of these registers across it.
template <int N>
__device__ inline void fence_registers(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i])::"memory");
}

#define SUMS_32                                                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64                                                                                                    \
  SUMS_32                                                                                                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_8(sum, i) \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), \
      "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define REGS_32(sum, i) REGS_8(sum, i), REGS_8(sum, i + 8), REGS_8(sum, i + 16), REGS_8(sum, i + 24)

// sum [64, 128] = (adding ? sum : 0) + A [64, 16] B [128, 16]^T. A and B are row-major tiles in shared memory.
template <class T>
__device__ inline void multiply(float (&sum)[64], uint64_t a, uint64_t b, bool adding);

// sum [64, 2 * N] += A [64, 16] B [16, 2 * N]. A is in registers, B is a row-major tile in shared memory.
template <class T, int N>
__device__ inline void multiply(float (&sum)[N], const uint32_t (&a)[4], uint64_t b);

#define PRODUCTS_OF(T, NAME)                                                                                        \
  template <>                                                                                                       \
  __device__ inline void multiply<T>(float (&sum)[64], uint64_t a, uint64_t b, bool adding) {                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME \
                 " {" SUMS_64 "}, %64, %65, p, 1, 1, 0, 0; }"                                                       \
                 : REGS_32(sum, 0), REGS_32(sum, 32)                                                                \
                 : "l"(a), "l"(b), "r"((int)adding));                                                               \
  }                                                                                                                 \
  template <>                                                                                                       \
  __device__ inline void multiply<T>(float (&sum)[64], const uint32_t (&a)[4], uint64_t b) {                        \
    asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME  \
                 " {" SUMS_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"                                         \
                 : REGS_32(sum, 0), REGS_32(sum, 32)                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
  }                                                                                                                 \
  template <>                                                                                                       \
  __device__ inline void multiply<T>(float (&sum)[32], const uint32_t (&a)[4], uint64_t b) {                        \
    asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME   \
                 " {" SUMS_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"                                         \
                 : REGS_32(sum, 0)                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
  }

PRODUCTS_OF(__nv_bfloat16, "bf16")
PRODUCTS_OF(__half, "f16")

#undef PRODUCTS_OF
#undef REGS_32
#undef REGS_8
#undef SUMS_64
#undef SUMS_32

}  // namespace localllm::cuda::hopper
