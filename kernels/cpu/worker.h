// A kernel is written as one thread's share of the work: f(args, worker). The caller runs it on every thread of a team.
#pragma once

#include <cstddef>

namespace localllm {

class Team;

// One thread of a run. Every worker of a run calls the same kernels in the same order with the same arguments, so
// that several kernels can follow each other in one run, with barriers between them instead of forks and joins.
struct Worker {
  int index;  // 0 is the thread that asked for the run
  int count;
  Team* team;

  // Wait for all workers of this run; what they wrote before it is seen after it.
  void barrier() const;

  // This thread's own memory, 64-byte aligned, of at least `bytes`; kept from run to run, contents undefined.
  void* scratch(size_t bytes) const;
};

// The share [begin, end) of `total` equal items that falls to a worker: sizes differ by one at most, and the same
// worker gets the same share each time, so a weight stays with the core (and the memory) that first touched it.
struct Share {
  long begin, end;
};

static inline Share share_of(long total, const Worker& worker) {
  long each = total / worker.count, rest = total % worker.count;
  long begin = worker.index * each + (worker.index < rest ? worker.index : rest);
  return {begin, begin + each + (worker.index < rest ? 1 : 0)};
}

}  // namespace localllm
