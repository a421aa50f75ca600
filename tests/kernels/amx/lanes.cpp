// The choice of a lane (dispatch.cpp), with the lanes' names and nothing behind them. Prints those that may be used.
#include <cstdio>

#include "dispatch.h"

#define STUB(lane) \
  namespace localllm::lane { extern const Lane table; const Lane table = {.name = #lane}; }
STUB(generic)
STUB(avx2)
STUB(avxvnni)
STUB(avx512)
STUB(amx)

int main() {
  for (const std::string& name : localllm::usable_lanes()) printf("%s ", name.c_str());
  printf("-> %s\n", localllm::lane().name);
}
