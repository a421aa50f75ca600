// Which lane this CPU and system allow, and which is in use.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace localllm {

// Names of the lanes that work here, the slowest first; "generic" is always among them.
std::vector<std::string> usable_lanes();

// From now on kernels come from this lane; "" is the fastest usable one. Returns its name. Throws std::runtime_error
// naming those that work here where this one does not, or is not known.
std::string use_lane(const std::string& name);

}  // namespace localllm
