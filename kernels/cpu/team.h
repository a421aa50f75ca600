// The threads that kernels run on: one team for the process, made when first needed and kept.
//
// Worker 0 is whichever thread asks; the others are the team's own, each pinned to a physical core. Between runs they
// spin for a moment, since the next kernel usually follows at once, and then sleep. A forked child has its own team.
#pragma once

#include <cstdint>
#include <mutex>

#include "worker.h"

namespace localllm {

// One or more kernels run by the team, which is the calling thread's for as long as this lives: other threads wait.
class Run {
 public:
  // `bytes`: about what the kernels read and write. What little is done sooner than the others wake is the calling
  // thread's alone.
  explicit Run(int64_t bytes);

  int workers() const { return workers_; }

  // One memory for all workers, 64-byte aligned; contents undefined, valid while this lives. Throws std::bad_alloc.
  void* shared(size_t bytes);

  // Runs kernel(args, worker) on every worker and returns when all are done. Kernels do not throw.
  template <class Args>
  void all(void (*kernel)(const Args&, const Worker&), const Args& args) {
    if (!team_) return kernel(args, Worker{0, 1, nullptr});
    struct Job {
      void (*kernel)(const Args&, const Worker&);
      const Args& args;
    } job{kernel, args};
    start([](const void* job, const Worker& worker) { ((const Job*)job)->kernel(((const Job*)job)->args, worker); }, &job);
  }

 private:
  void start(void (*work)(const void*, const Worker&), const void* job);

  std::unique_lock<std::mutex> held_;
  Team* team_ = nullptr;  // null: alone
  int workers_ = 1;
};

// The number of workers from now on; 0: LOCALLLM_THREADS, else OMP_NUM_THREADS, else as many physical cores as this
// process may use. Returns it. Throws std::runtime_error where a variable holds no number, or for more than 1024.
int use_threads(int count);

// Work on fewer bytes than these is the calling thread's alone. Returns what held before; tests share everything.
int64_t share_from(int64_t bytes);

// As set, or as they would be; starts nothing.
int threads();

}  // namespace localllm
