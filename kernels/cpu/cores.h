// The CPU cores that this process may use, and the pinning of threads to them.
#pragma once

#include <vector>

namespace localllm {

// One logical CPU of each physical core that this process may use, in ascending order. At least one.
std::vector<int> cores();

// The useful number of threads: the number of cores, or fewer if the container's CPU quota is smaller.
int usable_cores();

// Pins the calling thread to one logical CPU. Does nothing on systems without thread affinity.
void pin(int cpu);

}  // namespace localllm
