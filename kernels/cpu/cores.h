// Where threads may run.
#pragma once

#include <vector>

namespace localllm {

// One logical CPU of each physical core that this process may use, in the system's order. At least one.
std::vector<int> cores();

// How many of them are worth a thread: fewer where the container's share of processor time is smaller.
int usable_cores();

// Keeps the calling thread on one CPU. Systems that cannot do without it.
void pin(int cpu);

}  // namespace localllm
