// The selection of the ISA variant whose kernels run.
#pragma once

#include <string>
#include <vector>

#include "../kernels.h"

namespace localllm {

// Names of the ISA variants that this CPU and system can run, the slowest first. Throws std::runtime_error if the
// library has only variants for other CPUs.
std::vector<std::string> usable_variants();

// Selects the ISA variant for all later kernels; "" selects the fastest usable one. Returns its name. Throws
// std::runtime_error with the usable names if the variant is unknown or not usable here.
std::string use_variant(const std::string& name);

}  // namespace localllm
