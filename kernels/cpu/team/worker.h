// A kernel is a function f(args, worker) that computes the share of one worker. It runs on every worker of a team.
#pragma once

#include <cstddef>

namespace localllm {

class Team;

// One thread of a run. All workers of a run call the same kernels in the same order with the same arguments. So one run
// can execute several kernels with barriers between them, which are cheaper than a fork and a join for each kernel.
struct Worker {
  int index;  // 0: the thread that started the run
  int count;
  Team* team;

  // Waits for all workers of this run. Writes of any worker before the barrier are visible to all workers after it.
  void barrier() const;

  // At least `bytes` of memory that only this worker uses: 64-byte aligned, uninitialised, reused by later runs.
  void* scratch(size_t bytes) const;
};

// The items [begin, end) of `total` that one worker computes. The shares of two workers differ by one item at most. A
// worker gets the same share in every run, so a weight stays near the core that touched it first.
struct Share {
  long begin, end;
};

static inline Share share_of(long total, const Worker& worker) {
  long size = total / worker.count, remainder = total % worker.count;
  long begin = worker.index * size + (worker.index < remainder ? worker.index : remainder);
  return {begin, begin + size + (worker.index < remainder ? 1 : 0)};
}

// Assigns the items [0, total) to the workers, a chunk at a time. A worker first takes the items of its own share, then
// items that are left in the shares of other workers, because some cores are slower than others. Equal cores therefore
// compute the same items in each run. All workers of a run must use the same loops in the same order:
//   for (Chunks chunks(total, worker); chunks.next();)
//     for (long item = chunks.begin; item < chunks.end; item++) …
// Results must not depend on the worker that computes an item.
class Chunks {
 public:
  long begin = 0, end = 0;  // the current chunk

  Chunks(long total, const Worker& worker);

  // Takes the next chunk. Returns false if no items are left.
  bool next();

 private:
  const Worker& worker_;
  long total_;
  unsigned loop_ = 0;   // number of this loop, equal on all workers
  int exhausted_ = 0;   // number of shares without items, from the own share on
};

}  // namespace localllm
