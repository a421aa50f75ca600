// Until every family is here: weak kernels that say which is missing.
#include <cstdio>
#include <cstdlib>

#include "linear.h"

namespace localllm::LANE {
#define ABSENT(name, Args) \
  __attribute__((weak)) void name(const Args&, const Worker&) { fprintf(stderr, #name " is absent\n"); abort(); }
#define NO_MEMORY(name, Args) \
  __attribute__((weak)) size_t name(const Args&, int) { return 0; }
ABSENT(rms_norm, NormArgs)
ABSENT(layer_norm, NormArgs)
ABSENT(gate, ActivationArgs)
ABSENT(rope, RopeArgs)
ABSENT(store, StoreArgs)
ABSENT(copy_pages, CopyPagesArgs)
ABSENT(append, AppendArgs)
ABSENT(attention, AttentionArgs)
NO_MEMORY(attention_shared, AttentionArgs)
ABSENT(linear, LinearArgs)
NO_MEMORY(linear_shared, LinearArgs)
ABSENT(pack, PackArgs)
ABSENT(linear_dense, LinearArgs)
NO_MEMORY(linear_dense_shared, LinearArgs)
ABSENT(pack_dense, PackArgs)
ABSENT(linear_int8, LinearArgs)
NO_MEMORY(linear_int8_shared, LinearArgs)
ABSENT(pack_int8, PackArgs)
ABSENT(linear_int4, LinearArgs)
NO_MEMORY(linear_int4_shared, LinearArgs)
ABSENT(pack_int4, PackArgs)
ABSENT(linear_fp8, LinearArgs)
NO_MEMORY(linear_fp8_shared, LinearArgs)
ABSENT(pack_fp8, PackArgs)
ABSENT(embedding, EmbeddingArgs)
ABSENT(greedy, GreedyArgs)
NO_MEMORY(greedy_shared, GreedyArgs)
ABSENT(draw, DrawArgs)
NO_MEMORY(draw_shared, DrawArgs)
ABSENT(mask, MaskArgs)
ABSENT(logprob, LogprobArgs)
NO_MEMORY(logprob_shared, LogprobArgs)
ABSENT(ceiling, CeilingArgs)
}  // namespace localllm::LANE
