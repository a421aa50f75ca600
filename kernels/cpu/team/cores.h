// The CPU cores that this process may use, and the pinning of threads to them.
#pragma once

#include <string>
#include <vector>

namespace localllm {

// One logical CPU of each physical core that this process may use, in ascending order. At least one.
std::vector<int> cores();

// The `count` fastest of `cpus`, in ascending order: the performance cores of a processor that has efficiency cores too.
// `folder`: the system's description of the CPUs. Cores of unknown speed count as slowest; of equal cores the first ones.
std::vector<int> fastest(std::vector<int> cpus, int count, const std::string& folder = "/sys/devices/system/cpu/");

// The useful number of threads: the number of cores, or fewer if the container's CPU quota is smaller.
int usable_cores();

// Pins the calling thread to one logical CPU. Does nothing on systems without thread affinity.
void pin(int cpu);

}  // namespace localllm
