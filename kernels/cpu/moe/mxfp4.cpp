// Experts with MXFP4 weights and float activations.

#include "formats.h"
#include "expanded.h"
#include "../products/mxfp4_weights.h"

namespace localllm::VARIANT {

size_t experts_mxfp4_shared(const ExpertsArgs&) { return 0; }

void experts_mxfp4(const ExpertsArgs& args, const Worker& worker) { run_experts<ExpandedRows<Mxfp4>>(args, worker); }

}  // namespace localllm::VARIANT
