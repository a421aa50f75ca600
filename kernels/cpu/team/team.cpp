#include "team.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cores.h"
#include "memory.h"

namespace localllm {
namespace {

constexpr int MAX_WORKERS = 1024;
constexpr int BARRIER_ROUNDS = 10;  // log2(MAX_WORKERS)
constexpr auto SPIN_TIME = std::chrono::microseconds(50);  // longer than the time between two ops of a Python step
constexpr int SPINS_BEFORE_YIELD = 2000;
constexpr long CHUNKS_PER_SHARE = 4;  // a worker takes this part of the items that are left in a share

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() is true. Yields after a while, because the thread that makes it true may need this core.
template <class Ready>
inline void wait_until(Ready ready) {
  for (int spins = 0; !ready(); spins++)
    if (spins < SPINS_BEFORE_YIELD) pause_cpu();
    else std::this_thread::yield();
}

using Work = void (*)(const void*, const Worker&);

// State of one worker. Other workers access only the first cache line; the rest is for the worker itself.
struct alignas(64) WorkerState {
  std::atomic<uint32_t> finished_run{0};                      // number of the last run that the worker finished
  std::atomic<uint32_t> barrier_signals[BARRIER_ROUNDS] = {};  // per round: number of the last barrier signalled to it
  // The items of the worker's share that are assigned: in the high half the number of the loop, in the low half their
  // count. See Chunks.
  alignas(64) std::atomic<uint64_t> assigned{0};
  alignas(64) uint32_t barriers = 0;                          // number of barriers that the worker entered
  uint32_t loops = 0;                                         // number of the last loop that the worker entered
  Buffer scratch;
};

}  // namespace

class Team {
 public:
  explicit Team(int size) : size_(size), states_(new WorkerState[size]) {
    std::vector<int> cpus = fastest(cores(), size);
    bool pinned = size == (int)cpus.size();
    for (int index = 1; index < size; index++)
      threads_.emplace_back([this, index, pinned, cpu = pinned ? cpus[index] : 0] {
        if (pinned) pin(cpu);
        run_loop(index);
      });
  }

  ~Team() {
    work_ = nullptr;
    publish_run();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return size_; }
  Buffer& shared() { return shared_; }
  Buffer& scratch(int index) { return states_[index].scratch; }

  void run(Work work, const void* job) {
    work_ = work;
    job_ = job;
    uint32_t number = publish_run();
    work(job, Worker{0, size_, this});
    for (int index = 1; index < size_; index++)
      wait_until([&] { return states_[index].finished_run.load(std::memory_order_acquire) == number; });
  }

  // A dissemination barrier (Hensgen, Finkel & Manber, 1988): in round r, worker i signals worker i + 2^r and waits for
  // the signal of worker i - 2^r. Only one worker writes each flag, so no cache line is contended.
  void barrier(int index) {
    uint32_t number = ++states_[index].barriers;
    for (int round = 0, step = 1; step < size_; round++, step *= 2) {
      int next = index + step < size_ ? index + step : index + step - size_;
      states_[next].barrier_signals[round].store(number, std::memory_order_release);
      std::atomic<uint32_t>& signal = states_[index].barrier_signals[round];
      wait_until([&] { return (int32_t)(signal.load(std::memory_order_acquire) - number) >= 0; });
    }
  }

  // The number of the loop that a worker enters, equal on all workers. The numbers of two loops are compared by their
  // distance, so every loop renews the worker's number, also if the worker's share is empty.
  uint32_t enter_loop(int index) {
    uint32_t loop = ++states_[index].loops;
    std::atomic<uint64_t>& assigned = states_[index].assigned;
    uint64_t word = assigned.load(std::memory_order_relaxed);
    while ((int32_t)((uint32_t)(word >> 32) - loop) < 0)  // else another worker has begun this loop for the share
      if (assigned.compare_exchange_weak(word, (uint64_t)loop << 32, std::memory_order_relaxed)) break;
    return loop;
  }

  // Takes items from the share of a worker, which has `size` items. Returns their range in the share; empty if no items
  // are left. The first worker that takes items of a share begins the loop for it.
  Share take(int owner, uint32_t loop, long size) {
    std::atomic<uint64_t>& assigned = states_[owner].assigned;
    uint64_t word = assigned.load(std::memory_order_relaxed);
    for (;;) {
      int32_t distance = (int32_t)((uint32_t)(word >> 32) - loop);
      if (distance > 0) return {size, size};  // the owner is in a later loop, so all items of this one are assigned
      long begin = distance == 0 ? (long)(uint32_t)word : 0;
      if (begin >= size) return {size, size};
      long count = (size - begin + CHUNKS_PER_SHARE - 1) / CHUNKS_PER_SHARE;
      uint64_t next = (uint64_t)loop << 32 | (uint64_t)(begin + count);
      if (assigned.compare_exchange_weak(word, next, std::memory_order_relaxed)) return {begin, begin + count};
    }
  }

 private:
  // Makes work_ and job_ visible to all workers and wakes the sleeping ones. Returns the number of the run.
  uint32_t publish_run() {
    uint32_t number = runs_.load(std::memory_order_relaxed) + 1;
    runs_.store(number, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) runs_.notify_all();
    return number;
  }

  void run_loop(int index) {
    for (uint32_t last = 0;;) {
      wait_for_run_after(last);
      last++;
      if (!work_) return;
      work_(job_, Worker{index, size_, this});
      states_[index].finished_run.store(last, std::memory_order_release);
    }
  }

  void wait_for_run_after(uint32_t last) {
    auto until = std::chrono::steady_clock::now() + SPIN_TIME;
    for (int spins = 1; runs_.load(std::memory_order_acquire) == last; spins++) {
      pause_cpu();
      if (spins % 32 == 0 && std::chrono::steady_clock::now() > until) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        runs_.wait(last, std::memory_order_seq_cst);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
      }
    }
  }

  const int size_;
  Work work_ = nullptr;
  const void* job_ = nullptr;
  std::unique_ptr<WorkerState[]> states_;
  Buffer shared_;
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<uint32_t> runs_{0};  // number of runs so far
  alignas(64) std::atomic<int> sleepers_{0};   // number of sleeping workers
};

namespace {

// A core processes this number of bytes in about the time that it takes to wake another core.
std::atomic<int64_t> smallest_shared_work{32 << 10};

// The memory of a thread that runs kernels alone.
thread_local struct {
  Buffer scratch, shared;
} caller_memory;

struct Process {
  std::mutex mutex;
  std::unique_ptr<Team> team;  // null until the first run
  int workers = 0;             // 0: not set yet
};

Process* process() {
  static auto* instance = new Process;  // never freed, because its threads may still sleep when the process exits
  return instance;
}

// Runs in a forked child. The threads of the team do not exist there, and the mutex may be locked by one of them, so
// the child replaces both. It constructs in place: the destructor of the team would wait for those threads.
void reset_after_fork() {
  int workers = process()->workers;
  new (process()) Process{.mutex = {}, .team = {}, .workers = workers};
}

[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, reset_after_fork);

// The value of an environment variable; 0 if it is not set.
int thread_count_in(const char* variable) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return 0;
  char* end;
  long value = std::strtol(text, &end, 10);
  if ((*end && *end != ',') || value < 0 || value > MAX_WORKERS)  // OpenMP allows one number for each nesting level
    throw std::runtime_error(std::string(variable) + " is \"" + text + "\"; a number of threads from 0 to " +
                             std::to_string(MAX_WORKERS) + " expected");
  return (int)value;
}

int default_threads() {
  if (int count = thread_count_in("LOCALLLM_THREADS")) return count;
  if (int count = thread_count_in("OMP_NUM_THREADS")) return count;
  return usable_cores();
}

}  // namespace

int use_threads(int count) {
  if (count < 0 || count > MAX_WORKERS)
    throw std::runtime_error("use_threads: count is " + std::to_string(count) + ", 0 (the default) to " +
                             std::to_string(MAX_WORKERS) + " expected");
  std::lock_guard lock(process()->mutex);
  process()->workers = count ? count : default_threads();
  if (process()->team && process()->team->size() != process()->workers) process()->team.reset();
  return process()->workers;
}

int threads() {
  std::lock_guard lock(process()->mutex);
  return process()->workers ? process()->workers : default_threads();
}

int64_t share_from(int64_t bytes) { return smallest_shared_work.exchange(bytes); }

Run::Run(int64_t bytes) {
  if (bytes < smallest_shared_work.load(std::memory_order_relaxed)) return;
  Process* process_state = process();
  lock_ = std::unique_lock(process_state->mutex);
  if (!process_state->workers) process_state->workers = default_threads();
  if (process_state->workers == 1) return;
  if (!process_state->team) process_state->team = std::make_unique<Team>(process_state->workers);
  team_ = process_state->team.get();
  workers_ = process_state->workers;
}

void* Run::shared(size_t bytes) { return (team_ ? team_->shared() : caller_memory.shared).reserve(bytes); }

void Run::start(Work work, const void* job) { team_->run(work, job); }

void Worker::barrier() const {
  if (count > 1) team->barrier(index);
}

Chunks::Chunks(long total, const Worker& worker) : worker_(worker), total_(total) {
  if (worker.count > 1) loop_ = worker.team->enter_loop(worker.index);
}

bool Chunks::next() {
  if (worker_.count == 1) {
    begin = end;
    end = total_;
    return begin < end;
  }
  long size = total_ / worker_.count, remainder = total_ % worker_.count;  // as in share_of
  for (; exhausted_ < worker_.count; exhausted_++) {
    int owner = worker_.index + exhausted_;
    if (owner >= worker_.count) owner -= worker_.count;
    Share taken = worker_.team->take(owner, loop_, size + (owner < remainder));
    if (taken.begin < taken.end) {
      long first = owner * size + std::min((long)owner, remainder);
      begin = first + taken.begin;
      end = first + taken.end;
      return true;
    }
  }
  return false;
}

void* Worker::scratch(size_t bytes) const {
  try {
    return (team ? team->scratch(index) : caller_memory.scratch).reserve(bytes);
  } catch (const std::bad_alloc&) {  // an exception cannot leave the worker: the others wait for it at a barrier
    std::fprintf(stderr, "localllm: out of memory: a kernel cannot allocate %zu bytes of scratch memory\n", bytes);
    std::abort();
  }
}

}  // namespace localllm
