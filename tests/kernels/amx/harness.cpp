// Calls of the tile kernels with plain numbers, on a team of fresh threads, for tests. What they hand to the AVX-512
// lane is only counted here.
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if !defined(TILES_EMULATED)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace localllm {

struct Free {
  void operator()(void* memory) const { free(memory); }
};

class Team {
 public:
  explicit Team(int count) : gate(count), scratch(count) {}
  std::barrier<> gate;
  std::vector<std::unique_ptr<void, Free>> scratch;

  template <class Kernel, class Args>
  static void run(Kernel kernel, const Args& args, int count) {
    Team team(count);
    std::vector<std::thread> threads;
    for (int i = 0; i < count; i++) threads.emplace_back([&, i] { kernel(args, Worker{i, count, &team}); });
    for (std::thread& thread : threads) thread.join();
  }
};

static void* fresh(size_t bytes) {  // garbage in it, so that nothing relies on zeros
  void* memory = aligned_alloc(64, round_up(bytes + 1, 64));
  memset(memory, 0xff, bytes);
  return memory;
}

void Worker::barrier() const { team->gate.arrive_and_wait(); }
void* Worker::scratch(size_t bytes) const {
  team->scratch[index].reset(fresh(bytes));
  return team->scratch[index].get();
}

static std::atomic<int> handed_over;

namespace avx512 {
void linear(const LinearArgs&, const Worker&) { handed_over++; }
size_t linear_shared(const LinearArgs&, int) { return 0; }
}  // namespace avx512

namespace amx {
void linear(const LinearArgs& args, const Worker& worker);
size_t linear_shared(const LinearArgs& args, int workers);
}  // namespace amx

}  // namespace localllm

using namespace localllm;

extern "C" {

// False where the system refuses this process the tiles' registers.
__attribute__((visibility("default"))) bool open_tiles() {
#if defined(TILES_EMULATED)
  return true;
#else
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#endif
}

// The number of threads that handed the product to the AVX-512 lane.
__attribute__((visibility("default"))) int run_linear(
    void* out, const void* x, const void* weight, const float* bias, int out_type, int x_type, int format, int64_t rows,
    int64_t outs, int64_t ins, int64_t group, int64_t x_stride, int64_t out_stride, bool wide, int workers) {
  LinearArgs args{out,  x,    weight, bias, Type(out_type), Type(x_type), Format(format), rows,
                  outs, ins,  group,  x_stride, out_stride, wide, nullptr};
  std::unique_ptr<void, Free> shared(fresh(amx::linear_shared(args, workers)));
  args.shared = shared.get();
  handed_over = 0;
  Team::run(amx::linear, args, workers);
  return handed_over;
}
}
