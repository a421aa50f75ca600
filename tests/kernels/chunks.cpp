// Checks that the loops of Chunks (kernels/cpu/team/worker.h) compute each item once. Prints the items that each of 4
// workers computes if worker 1 is slow.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "team/team.h"

using namespace localllm;

struct Loops {
  std::vector<std::vector<std::atomic<int>>*>* counts;
  std::atomic<int>* taken;  // per worker
  bool slow;
};

static void compute(const Loops& loops, const Worker& worker) {
  for (auto* counts : *loops.counts) {
    for (Chunks chunks((long)counts->size(), worker); chunks.next();)
      for (long item = chunks.begin; item < chunks.end; item++) {
        (*counts)[item]++;
        loops.taken[worker.index]++;
        if (loops.slow && worker.index == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
  }
}

int main() {
  use_threads(4);
  share_from(0);
  for (int run = 0; run < 500; run++) {
    std::vector<std::vector<std::atomic<int>>*> counts;
    for (long size : {0, 1, 3, 64, 1000}) counts.push_back(new std::vector<std::atomic<int>>(size + run % 7));
    std::atomic<int> taken[4] = {};
    {
      Run team(1 << 20);
      team.all(compute, Loops{&counts, taken, false});
    }
    for (auto* one : counts)
      for (auto& count : *one)
        if (count != 1) return std::printf("an item was computed %d times\n", count.load()), 1;
  }
  std::vector<std::atomic<int>> items(64);
  std::vector<std::vector<std::atomic<int>>*> counts = {&items};
  std::atomic<int> taken[4] = {};
  {
    Run team(1 << 20);
    team.all(compute, Loops{&counts, taken, true});
  }
  std::printf("%d %d %d %d\n", taken[0].load(), taken[1].load(), taken[2].load(), taken[3].load());
}
