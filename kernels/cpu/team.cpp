#include "team.h"

#include <pthread.h>

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

constexpr int MOST_WORKERS = 1024;
constexpr int ROUNDS = 10;  // of a barrier: log2(MOST_WORKERS)
constexpr auto SPIN = std::chrono::microseconds(50);  // longer than Python takes between two ops of a step
constexpr int PATIENCE = 2000;  // turns of a wait before it lets other programs have the core

inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready(), giving way after a while: the one waited for may need this core to get there.
template <class Ready>
inline void wait_for(Ready ready) {
  for (int turn = 0; !ready(); turn++)
    if (turn < PATIENCE) rest();
    else std::this_thread::yield();
}

using Work = void (*)(const void*, const Worker&);

// What others read of a worker, on cache lines of its own.
struct alignas(64) Post {
  std::atomic<uint32_t> done{0};         // the last run it finished
  std::atomic<uint32_t> met[ROUNDS] = {};  // how often it was told to go on, by round of the barrier
  alignas(64) uint32_t barriers = 0;     // how many it has come to; its own
  Block scratch;                         // its own
};

}  // namespace

class Team {
 public:
  explicit Team(int size) : size_(size), posts_(new Post[size]) {
    std::vector<int> places = cores();
    bool pinned = size <= (int)places.size();
    for (int index = 1; index < size; index++)
      threads_.emplace_back([this, index, pinned, cpu = pinned ? places[index] : 0] {
        if (pinned) pin(cpu);
        serve(index);
      });
  }

  ~Team() {
    work_ = nullptr;
    announce();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return size_; }
  Block& shared() { return shared_; }
  Block& scratch(int index) { return posts_[index].scratch; }

  void run(Work work, const void* job) {
    work_ = work, job_ = job;
    uint32_t number = announce();
    work(job, Worker{0, size_, this});
    for (int index = 1; index < size_; index++)
      wait_for([&] { return posts_[index].done.load(std::memory_order_acquire) == number; });
  }

  // A dissemination barrier (Hensgen, Finkel & Manber, 1988): in round r everyone tells the one 2^r further on and
  // waits to be told, so no cache line is fought over.
  void meet(int index) {
    uint32_t number = ++posts_[index].barriers;
    for (int round = 0, step = 1; step < size_; round++, step *= 2) {
      int next = index + step < size_ ? index + step : index + step - size_;
      posts_[next].met[round].store(number, std::memory_order_release);
      wait_for([&] { return (int32_t)(posts_[index].met[round].load(std::memory_order_acquire) - number) >= 0; });
    }
  }

 private:
  // Lets everyone see work_ and job_; those asleep are woken.
  uint32_t announce() {
    uint32_t number = called_.load(std::memory_order_relaxed) + 1;
    called_.store(number, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) called_.notify_all();
    return number;
  }

  void serve(int index) {
    for (uint32_t last = 0;;) {
      await(last);
      last++;
      if (!work_) return;
      work_(job_, Worker{index, size_, this});
      posts_[index].done.store(last, std::memory_order_release);
    }
  }

  void await(uint32_t last) {
    auto until = std::chrono::steady_clock::now() + SPIN;
    for (int turn = 1; called_.load(std::memory_order_acquire) == last; turn++) {
      rest();
      if (turn % 32 == 0 && std::chrono::steady_clock::now() > until) {
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        called_.wait(last, std::memory_order_seq_cst);
        asleep_.fetch_sub(1, std::memory_order_relaxed);
      }
    }
  }

  const int size_;
  Work work_ = nullptr;
  const void* job_ = nullptr;
  std::unique_ptr<Post[]> posts_;
  Block shared_;
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<uint32_t> called_{0};  // counts runs
  alignas(64) std::atomic<int> asleep_{0};
};

namespace {

// A core is through with these in about the time it takes to wake another.
std::atomic<int64_t> few_bytes{32 << 10};

// The memory of a thread that runs kernels alone.
thread_local struct {
  Block scratch, shared;
} alone;

struct Process {
  std::mutex held;
  std::unique_ptr<Team> team;  // null until somebody runs something
  int wanted = 0;              // threads; 0: not settled
};

Process* process() {
  static Process* ours = [] {
    auto* first = new Process;  // never freed: at exit its threads may still be asleep in it
    return first;
  }();
  return ours;
}

// After a fork the team's threads are gone and its lock may be held by one that is no more: the child forgets both.
// Placed anew rather than freed, since freeing would wait for those threads.
void forget() {
  int wanted = process()->wanted;
  new (process()) Process{.held = {}, .team = {}, .wanted = wanted};
}

[[maybe_unused]] const int forget_in_children = pthread_atfork(nullptr, nullptr, forget);

// The number a variable holds; 0 where it is not set, or set to that.
int number_in(const char* variable) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return 0;
  char* end;
  long value = std::strtol(text, &end, 10);
  if ((*end && *end != ',') || value < 0 || value > MOST_WORKERS)  // OpenMP allows one number for each nesting level
    throw std::runtime_error(std::string(variable) + " is \"" + text + "\"; a number of threads from 0 to " +
                             std::to_string(MOST_WORKERS) + " expected");
  return (int)value;
}

int default_threads() {
  if (int asked = number_in("LOCALLLM_THREADS")) return asked;
  if (int asked = number_in("OMP_NUM_THREADS")) return asked;
  return usable_cores();
}

}  // namespace

int use_threads(int count) {
  if (count < 0 || count > MOST_WORKERS)
    throw std::runtime_error("use_threads: " + std::to_string(count) + "; 0 (as many as are useful) to " +
                             std::to_string(MOST_WORKERS) + " expected");
  std::lock_guard lock(process()->held);
  process()->wanted = count ? count : default_threads();
  if (process()->team && process()->team->size() != process()->wanted) process()->team.reset();
  return process()->wanted;
}

int threads() {
  std::lock_guard lock(process()->held);
  return process()->wanted ? process()->wanted : default_threads();
}

int64_t share_from(int64_t bytes) { return few_bytes.exchange(bytes); }

Run::Run(int64_t bytes) {
  if (bytes < few_bytes.load(std::memory_order_relaxed)) return;
  Process* here = process();
  held_ = std::unique_lock(here->held);
  if (!here->wanted) here->wanted = default_threads();
  if (here->wanted == 1) return;
  if (!here->team) here->team = std::make_unique<Team>(here->wanted);
  team_ = here->team.get();
  workers_ = here->wanted;
}

void* Run::shared(size_t bytes) { return (team_ ? team_->shared() : alone.shared).at_least(bytes); }

void Run::start(Work work, const void* job) { team_->run(work, job); }

void Worker::barrier() const {
  if (count > 1) team->meet(index);
}

void* Worker::scratch(size_t bytes) const {
  try {
    return (team ? team->scratch(index) : alone.scratch).at_least(bytes);
  } catch (const std::bad_alloc&) {  // the others wait at the next barrier: nobody could be told
    std::fprintf(stderr, "localllm: out of memory: a kernel needs %zu bytes of its own\n", bytes);
    std::abort();
  }
}

}  // namespace localllm
