// What is done at a time, and by whom. A task is a group of row blocks × some panels, for all inputs, a chunk after the
// other. The group's activations of a chunk stay in L2 while panels pass, so a worker keeps to its group as long as it
// has panels left. Whoever is free takes the next: some cores are slower than others, if only because they are shared.
#pragma once

#include "amx_plan.h"

namespace localllm::LANE {
namespace {

constexpr int64_t ACTIVATIONS = 1 << 20;  // bytes of a group and chunk, half of an L2
constexpr int64_t STEPS = 16;             // of a chunk, at most: 32 KiB of weights stay in L1 while row blocks pass
constexpr int64_t BLOCKS = 8;             // of a group, at most
constexpr int64_t PANELS = 12;            // of a task, at most: the sums of all its blocks and panels are kept
constexpr int64_t TASKS_PER_WORKER = 6;   // at least, where rows and panels suffice

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pieces_of(int64_t count, int64_t most) { return (count + most - 1) / most; }
static inline int64_t even(int64_t count, int64_t most) {  // the size of equal pieces of at most `most`
  return pieces_of(count, pieces_of(count, most));
}

struct Cut {
  int64_t blocks, groups;  // row blocks of a group, groups
  int64_t panels;          // all of them
  int64_t most;            // of a task
};

static inline Cut cut_of(const Plan& plan, int64_t panels, int workers) {
  Cut cut;
  cut.blocks = BLOCKS;
  while (cut.blocks > 1 && pieces_of(plan.blocks, cut.blocks) * panels < TASKS_PER_WORKER * workers) cut.blocks /= 2;
  cut.blocks = even(plan.blocks, cut.blocks);
  cut.groups = pieces_of(plan.blocks, cut.blocks);
  cut.panels = panels;
  cut.most = 1;
  return cut;
}

static inline Plan plan_of(const LinearArgs& args, Cut* cut, int workers) {
  Plan plan = steps_of(args);
  *cut = cut_of(plan, round_up(args.outs, PANEL) / PANEL, workers);
  plan.chunk = even(plan.steps, least(STEPS, ACTIVATIONS / (cut->blocks * BLOCK * plan.depth)));
  if (plan.groups > 1) plan.chunk = least(round_up(plan.chunk, plan.group_steps), plan.steps);  // whole groups
  if (plan.chunk < plan.steps) cut->most = PANELS;  // activations are read anew for each task, so it had better be long
  return plan;
}

struct Task {
  int64_t group, begin, end;  // panels [begin, end); none: the end
};

// Hands out tasks: first those of one group, then what others have left, the longest first. No more groups than
// workers are begun at a time, so that the panels which pass are the same for all, and come from memory once.
class Tasks {
 public:
  Tasks(uint8_t* counters, const Cut& cut, const Worker& worker)
      : counters(counters), cut(cut), worker(worker), begin(0), tried(0) {}

  Task next() {
    for (; begin < cut.groups; begin += worker.count, tried = 0) {
      int64_t begun = least(worker.count, cut.groups - begin), own = worker.index * begun / worker.count;
      for (; tried < begun; tried++) {
        int64_t group = begin + (own + tried) % begun;
        int64_t* counter = (int64_t*)(counters + group * COUNTER_BYTES);
        int64_t first = __atomic_load_n(counter, __ATOMIC_RELAXED), last;
        do {
          int64_t left = cut.panels - first, share = left * begun / (2 * worker.count);
          last = first + least(left, share < 2 ? least(2, cut.most) : least(share, cut.most));
        } while (first < cut.panels &&
                 !__atomic_compare_exchange_n(counter, &first, last, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        if (first < cut.panels) return {group, first, last};
      }
    }
    return {0, 0, 0};
  }

 private:
  uint8_t* counters;
  const Cut& cut;
  const Worker& worker;
  int64_t begin, tried;
};

}  // namespace
}  // namespace localllm::LANE
