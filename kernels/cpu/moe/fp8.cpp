// Experts with 8-bit float weights (e4m3) and float activations.

#include "../products/fp8_weights.h"
#include "formats.h"
#include "expanded.h"

namespace localllm::VARIANT {

size_t experts_fp8_shared(const ExpertsArgs&) { return 0; }

void experts_fp8(const ExpertsArgs& args, const Worker& worker) { run_experts<ExpandedRows<E4m3>>(args, worker); }

}  // namespace localllm::VARIANT
