// Division of a product into tasks, and their assignment to workers. A task is a group of row blocks × some panels, for
// all inputs, chunk by chunk. The activations of a group and chunk stay in L2 for all panels, so a worker prefers tasks
// of its current group. A worker takes the next task when it finishes one, because some cores are slower than others.
#pragma once

#include "amx_plan.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t ACTIVATIONS = 1 << 20;  // maximum bytes of activations per group and chunk: half of an L2 cache
constexpr int64_t STEPS = 16;             // maximum per chunk: 32 KiB of weights, which stay in L1 for all row blocks
constexpr int64_t BLOCKS = 8;             // maximum per group
constexpr int64_t PANELS = 12;            // maximum per task: memory has the sums of all its blocks and panels
constexpr int64_t TASKS_PER_WORKER = 6;   // minimum, if the product is large enough

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pieces_of(int64_t count, int64_t most) { return (count + most - 1) / most; }
static inline int64_t even(int64_t count, int64_t most) {  // size of about equal pieces, at most `most`
  return pieces_of(count, pieces_of(count, most));
}

struct Cut {
  int64_t blocks;      // row blocks per group
  int64_t groups;
  int64_t panels;      // of the weight
  int64_t max_panels;  // per task
};

static inline Cut cut_of(const Plan& plan, int64_t panels, int workers) {
  Cut cut;
  cut.blocks = BLOCKS;
  while (cut.blocks > 1 && pieces_of(plan.blocks, cut.blocks) * panels < TASKS_PER_WORKER * workers) cut.blocks /= 2;
  cut.blocks = even(plan.blocks, cut.blocks);
  cut.groups = pieces_of(plan.blocks, cut.blocks);
  cut.panels = panels;
  cut.max_panels = 1;
  return cut;
}

static inline Plan plan_of(const LinearArgs& args, Cut* cut, int workers) {
  Plan plan = steps_of(args);
  *cut = cut_of(plan, round_up(args.outs, PANEL) / PANEL, workers);
  plan.chunk = even(plan.steps, least(STEPS, ACTIVATIONS / (cut->blocks * BLOCK * plan.depth)));
  if (plan.groups > 1) plan.chunk = least(round_up(plan.chunk, plan.group_steps), plan.steps);  // complete groups
  if (plan.chunk < plan.steps) cut->max_panels = PANELS;  // every task reads all activations, so use large tasks
  return plan;
}

struct Task {
  int64_t group, begin, end;  // panels [begin, end); empty: no tasks are left
};

// Assigns tasks to this worker: first those of its own group, then the rest of other groups. The first tasks of a group
// have more panels than the last. At most as many groups as workers are active, so that all workers use the same panels
// at about the same time and memory is read once.
class Tasks {
 public:
  Tasks(uint8_t* counters, const Cut& cut, const Worker& worker)
      : counters(counters), cut(cut), worker(worker), begin(0), tried(0) {}

  Task next() {
    for (; begin < cut.groups; begin += worker.count, tried = 0) {
      int64_t active = least(worker.count, cut.groups - begin);
      int64_t start = worker.index * active / worker.count;
      for (; tried < active; tried++) {
        int64_t group = begin + (start + tried) % active;
        int64_t* counter = (int64_t*)(counters + group * COUNTER_BYTES);
        int64_t first = __atomic_load_n(counter, __ATOMIC_RELAXED), last;
        do {
          int64_t left = cut.panels - first;
          int64_t share = left * active / (2 * worker.count);
          last = first + least(left, share < 2 ? least(2, cut.max_panels) : least(share, cut.max_panels));
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
  int64_t begin;  // the first active group
  int64_t tried;  // number of active groups without tasks
};

}  // namespace
}  // namespace localllm::VARIANT
