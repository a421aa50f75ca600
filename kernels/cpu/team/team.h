// The thread team that runs the kernels. A process has one team; the team starts at the first use and lives as long as
// the process.
//
// Worker 0 is the calling thread. The team owns the other threads and pins each to a physical core. After a run these
// threads spin for a short time, because the next kernel usually follows at once, and then sleep. A forked child
// starts a team of its own.
#pragma once

#include <cstdint>
#include <mutex>

#include "worker.h"

namespace localllm {

// Exclusive use of the team by the calling thread. Other threads that construct a Run wait until this one is destroyed.
class Run {
 public:
  // `bytes`: approximate number of bytes that the kernels read and write. If it is small, the calling thread runs the
  // kernels alone, because waking the team would take longer.
  explicit Run(int64_t bytes);

  int workers() const { return workers_; }

  // Memory that all workers share: 64-byte aligned, uninitialised, valid until this Run is destroyed. Throws
  // std::bad_alloc.
  void* shared(size_t bytes);

  // Runs kernel(args, worker) on every worker and returns after all workers finish. Kernels must not throw.
  template <class Args>
  void all(void (*kernel)(const Args&, const Worker&), const Args& args) {
    if (!team_) return kernel(args, Worker{0, 1, nullptr});
    struct Job {
      void (*kernel)(const Args&, const Worker&);
      const Args& args;
    } job{kernel, args};
    auto run_job = [](const void* job, const Worker& worker) {
      ((const Job*)job)->kernel(((const Job*)job)->args, worker);
    };
    start(run_job, &job);
  }

 private:
  void start(void (*work)(const void*, const Worker&), const void* job);

  std::unique_lock<std::mutex> lock_;
  Team* team_ = nullptr;  // null: the calling thread runs alone
  int workers_ = 1;
};

// Sets the number of workers and returns it. 0 selects the default: LOCALLLM_THREADS, else OMP_NUM_THREADS, else the
// number of physical cores that this process may use. Throws std::runtime_error if the number is above 1024 or an
// environment variable is not a number.
int use_threads(int count);

// Sets the smallest number of bytes that a Run shares among the team; the calling thread runs smaller work alone.
// Returns the previous value. Tests set it to 0 so that every run uses the team.
int64_t share_from(int64_t bytes);

// The number of workers: the value that was set, else the default. Does not start the team.
int threads();

}  // namespace localllm
