// Detects the instruction sets that the CPU supports and the operating system enables.
#pragma once

#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace localllm {

inline bool has_generic() { return true; }

#if defined(__x86_64__)

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

inline Leaf leaf(unsigned number, unsigned subleaf = 0) {
  Leaf registers;
  __get_cpuid_count(number, subleaf, &registers.eax, &registers.ebx, &registers.ecx, &registers.edx);
  return registers;
}

inline bool bit(unsigned word, int index) { return word >> index & 1; }

// The register sets that the system saves at a context switch (XCR0). A program must not use other registers.
inline uint64_t saved_registers() {
  if (!bit(leaf(1).ecx, 27)) return 0;  // OSXSAVE: xgetbv is available
  uint32_t low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

constexpr uint64_t YMM = 0x6, ZMM = 0xe6, TILES = 0x60000;

inline bool saves(uint64_t registers) { return (saved_registers() & registers) == registers; }

inline bool has_avx2() {
  Leaf one = leaf(1);
  return saves(YMM) && bit(one.ecx, 12) && bit(one.ecx, 29) && bit(leaf(7).ebx, 5);  // FMA, F16C, AVX2
}

inline bool has_avxvnni() { return has_avx2() && bit(leaf(7, 1).eax, 4); }

inline bool has_avx512() {
  Leaf seven = leaf(7);
  return has_avx2() && saves(ZMM) && bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) &&
         bit(seven.ebx, 31) && bit(seven.ecx, 11) && bit(leaf(7, 1).eax, 5);  // F, DQ, BW, VL, VNNI, BF16
}

// Linux requires a process to request permission for the 8 KiB tile state (arch_prctl 0x1023, component 18).
inline bool tiles_permitted() {
#if defined(__linux__)
  static const bool permitted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return permitted;
#else
  return false;
#endif
}

inline bool has_amx() {
  unsigned features = leaf(7).edx;
  return has_avx512() && saves(TILES) && bit(features, 22) && bit(features, 24) && bit(features, 25) &&
         tiles_permitted();  // AMX-BF16, AMX-TILE, AMX-INT8
}

#endif

}  // namespace localllm
