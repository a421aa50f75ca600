// Division of a product into tasks, and their assignment to workers. A task is a group of row blocks × some panels, for
// all inputs, chunk by chunk. The activations of a group and chunk stay in L2 for all panels, so a worker prefers tasks
// of its current group. A worker takes the next task when it finishes one, because some cores are slower than others.
#pragma once

#include "plan.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t ACTIVATIONS = 1 << 20;  // maximum bytes of activations per group and chunk: half of an L2 cache
constexpr int64_t STEPS = 16;             // maximum steps per chunk: 32 KiB of weights stay in L1 for all row blocks
constexpr int64_t BLOCKS = 8;             // maximum row blocks per group
constexpr int64_t PANELS = 12;            // maximum panels per task: a worker stores the sums of all its blocks
constexpr int64_t TASKS_PER_WORKER = 6;   // minimum tasks per worker, if the product is large enough

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ceil_div(int64_t count, int64_t divisor) { return (count + divisor - 1) / divisor; }
// Items per group, if `count` items are divided evenly into groups of at most `max_size` items.
static inline int64_t even_size(int64_t count, int64_t max_size) {
  return ceil_div(count, ceil_div(count, max_size));
}

struct Division {
  int64_t blocks;      // row blocks per group
  int64_t groups;
  int64_t panels;      // number of panels of the weight
  int64_t max_panels;  // maximum panels per task
  bool prefetches;     // whether the products prefetch the next weights
};

static inline Division division_of(const Plan& plan, int64_t panels, int workers) {
  Division division;
  division.blocks = BLOCKS;
  while (division.blocks > 1 && ceil_div(plan.blocks, division.blocks) * panels < TASKS_PER_WORKER * workers)
    division.blocks /= 2;
  division.blocks = even_size(plan.blocks, division.blocks);
  division.groups = ceil_div(plan.blocks, division.blocks);
  division.panels = panels;
  division.max_panels = 1;
  // With fewer than 4 blocks, memory bandwidth limits the product, and the hardware prefetch suffices.
  division.prefetches = division.blocks >= 4;
  return division;
}

// Steps per chunk, for groups of `blocks` row blocks.
static inline int64_t chunk_of(const Plan& plan, int64_t blocks) {
  int64_t chunk = even_size(plan.steps, min_of(STEPS, ACTIVATIONS / (blocks * BLOCK * plan.depth)));
  // A chunk has complete quantisation groups.
  return plan.groups > 1 ? min_of(round_up(chunk, plan.group_steps), plan.steps) : chunk;
}

static inline Plan plan_of(const LinearArgs& args, Division* division, int workers) {
  Plan plan = steps_of(args);
  *division = division_of(plan, round_up(args.out_features, PANEL) / PANEL, workers);
  plan.chunk = chunk_of(plan, division->blocks);
  if (plan.chunk < plan.steps) division->max_panels = PANELS;  // every task reads all activations, so use large tasks
  return plan;
}

struct Task {
  int64_t group, begin, end;  // panels [begin, end); empty: no tasks are left
};

// Assigns tasks to this worker: first the tasks of its own group, then the remaining tasks of other groups. The first
// tasks of a group have more panels than the last. At most as many groups as workers are active, so that all workers
// use the same panels at about the same time and memory is read once.
class Tasks {
 public:
  Tasks(uint8_t* counters, const Division& division, const Worker& worker)
      : counters(counters), division(division), worker(worker), begin(0), exhausted(0) {}

  Task next() {
    for (; begin < division.groups; begin += worker.count, exhausted = 0) {
      int64_t active = min_of(worker.count, division.groups - begin);
      int64_t start = worker.index * active / worker.count;
      for (; exhausted < active; exhausted++) {
        int64_t group = begin + (start + exhausted) % active;
        int64_t* counter = (int64_t*)(counters + group * COUNTER_BYTES);
        int64_t first = __atomic_load_n(counter, __ATOMIC_RELAXED), last;
        do {
          int64_t left = division.panels - first;
          int64_t share = left * active / (2 * worker.count);
          last = first + min_of(left, share < 2 ? min_of(2, division.max_panels) : min_of(share, division.max_panels));
        } while (first < division.panels &&
                 !__atomic_compare_exchange_n(counter, &first, last, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        if (first < division.panels) return {group, first, last};
      }
    }
    return {0, 0, 0};
  }

 private:
  uint8_t* counters;
  const Division& division;
  const Worker& worker;
  int64_t begin;  // the first active group
  int64_t exhausted;  // number of active groups without tasks
};

}  // namespace
}  // namespace localllm::VARIANT
