// wgmma of the tiled kernel: 64 outputs (operand A) times 8 * N rows (operand B, K-major tiles of 128-byte rows).
//
// sums[n][0][i]: the sum of output g (i < 2) or g + 8 of the warp's 16 outputs and row 8 n + 2 t + i % 2.
#pragma once

#include "../../device/hopper.cuh"

namespace localllm::cuda::hopper {

#define LIST_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define REGS_4(C, n) C(sums[n][0][0]), C(sums[n][0][1]), C(sums[n][0][2]), C(sums[n][0][3])
#define REGS_16(C, n) REGS_4(C, n), REGS_4(C, n + 1), REGS_4(C, n + 2), REGS_4(C, n + 3)
#define REGS_32(C, n) REGS_16(C, n), REGS_16(C, n + 4)
#define REGS_64(C, n) REGS_32(C, n), REGS_32(C, n + 8)
#define REGS_128(C, n) REGS_64(C, n), REGS_64(C, n + 16)

// sums = (adding ? sums : 0) + A B^T for 32 inputs in int8. A is a tile in shared memory, or in registers as operand A of
// mma.sync.
template <int N>
__device__ inline void multiply_int8(int (&sums)[N][1][4], uint64_t a, uint64_t b, bool adding);
template <int N>
__device__ inline void multiply_int8(int (&sums)[N][1][4], const uint32_t (&a)[4], uint64_t b, bool adding);
// The same for 32 inputs in e4m3.
template <int N>
__device__ inline void multiply_e4m3(float (&sums)[N][1][4], uint64_t a, uint64_t b, bool adding);
// The same for 16 inputs in bf16.
template <int N>
__device__ inline void multiply_bf16(float (&sums)[N][1][4], const uint32_t (&a)[4], uint64_t b, bool adding);

#define PRODUCTS(N, R, A0, A1, A2, A3, A4, A5)                                                                       \
  template <>                                                                                                         \
  __device__ inline void multiply_int8<N / 8>(int (&sums)[N / 8][1][4], uint64_t a, uint64_t b, bool adding) {        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " A2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {"   \
                 LIST_##R "}, " A0 ", " A1 ", p; }"                                                                  \
                 : REGS_##R("+r", 0)                                                                                  \
                 : "l"(a), "l"(b), "r"((int)adding));                                                                 \
  }                                                                                                                   \
  template <>                                                                                                         \
  __device__ inline void multiply_int8<N / 8>(int (&sums)[N / 8][1][4], const uint32_t (&a)[4], uint64_t b,           \
                                              bool adding) {                                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " A5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {"   \
                 LIST_##R "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", p; }"                                         \
                 : REGS_##R("+r", 0)                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adding));                             \
  }                                                                                                                   \
  template <>                                                                                                         \
  __device__ inline void multiply_e4m3<N / 8>(float (&sums)[N / 8][1][4], uint64_t a, uint64_t b, bool adding) {      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " A2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                     \
                 "k32.f32.e4m3.e4m3 {" LIST_##R "}, " A0 ", " A1 ", p, 1, 1; }"                                       \
                 : REGS_##R("+f", 0)                                                                                  \
                 : "l"(a), "l"(b), "r"((int)adding));                                                                 \
  }                                                                                                                   \
  template <>                                                                                                         \
  __device__ inline void multiply_bf16<N / 8>(float (&sums)[N / 8][1][4], const uint32_t (&a)[4], uint64_t b,         \
                                              bool adding) {                                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " A5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                     \
                 "k16.f32.bf16.bf16 {" LIST_##R "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", p, 1, 1, 0; }"          \
                 : REGS_##R("+f", 0)                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adding));                             \
  }

PRODUCTS(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
PRODUCTS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
PRODUCTS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
PRODUCTS(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef PRODUCTS
#undef REGS_128
#undef REGS_64
#undef REGS_32
#undef REGS_16
#undef REGS_4
#undef LIST_128
#undef LIST_64
#undef LIST_32
#undef LIST_16

}  // namespace localllm::cuda::hopper
