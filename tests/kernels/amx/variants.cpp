// Prints the usable ISA variants and the one in use, for a test of kernels/cpu/isa/dispatch.cpp. The variants
// have names and no kernels.
#include <cstdio>

#include "isa/dispatch.h"

#define STUB(isa) \
  namespace localllm::isa { extern const Variant table; const Variant table = {.name = #isa}; }
STUB(generic)
STUB(avx2)
STUB(avxvnni)
STUB(avx512)
STUB(amx)

int main() try {
  for (const std::string& name : localllm::usable_variants()) printf("%s ", name.c_str());
  printf("-> %s\n", localllm::variant().name);
} catch (const std::exception& error) {
  printf("%s\n", error.what());
}
