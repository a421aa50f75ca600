// Prints the ISA variants that this machine can run, the slowest first. CMakeLists.txt runs it for VARIANTS=native.
#include <cstdio>

#include "features.h"

int main() {
  fputs("generic", stdout);
#if defined(__x86_64__)
  using namespace localllm;
  if (has_avx2()) fputs(";avx2", stdout);
  if (has_avxvnni()) fputs(";avxvnni", stdout);
  if (has_avx512()) fputs(";avx512", stdout);
  if (has_amx()) fputs(";amx", stdout);
#endif
}
