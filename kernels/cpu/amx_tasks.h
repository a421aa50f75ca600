// What is done at a time, and by whom. A task is a group of row blocks × a piece of the panels, for all inputs, a chunk
// after the other. Its activations stay in L2 while panels pass, so a worker keeps to its group as long as it has
// pieces left. Whoever is free takes the next: some cores are slower than others, if only because they are shared.
#pragma once

#include "amx_plan.h"

namespace localllm::LANE {
namespace {

constexpr int64_t ACTIVATIONS = 1 << 20;     // bytes of them in L2, half of it
constexpr int64_t PANELS = 8;                // of a task of several chunks, which keeps sums of all its blocks and panels
constexpr int64_t TASKS_PER_WORKER = 6;      // at least, where rows and panels suffice
constexpr int64_t COUNTER_BYTES = 64;        // of a group's counter, on a cache line of its own

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pieces_of(int64_t count, int64_t most) { return (count + most - 1) / most; }
static inline int64_t even(int64_t count, int64_t most) {  // the size of equal pieces of at most `most`
  return pieces_of(count, pieces_of(count, most));
}

struct Cut {
  int64_t blocks, groups;  // row blocks of a group, groups
  int64_t panels, pieces;  // panels of a piece, pieces
  int64_t chunk;           // steps
};

static inline Cut cut_of(const Plan& plan, int64_t panels, int workers) {
  int64_t block_bytes = plan.block_bytes();
  Cut cut;
  cut.blocks = 8 * block_bytes <= ACTIVATIONS ? 8 : 4;
  while (cut.blocks > 1 && pieces_of(plan.blocks, cut.blocks) * panels < TASKS_PER_WORKER * workers) cut.blocks /= 2;
  cut.blocks = even(plan.blocks, cut.blocks);
  cut.groups = pieces_of(plan.blocks, cut.blocks);
  cut.chunk = even(plan.steps, ACTIVATIONS / (cut.blocks * BLOCK * plan.depth));
  if (plan.groups > 1)  // whole groups of inputs
    cut.chunk = least(round_up(cut.chunk, plan.group_steps), plan.steps);
  int64_t most = cut.groups * panels / (TASKS_PER_WORKER * workers);
  cut.panels = cut.chunk == plan.steps || most < 1 ? 1 : even(panels, least(most, PANELS));
  cut.pieces = pieces_of(panels, cut.panels);
  return cut;
}

// Hands out tasks: first those of one group, then what others have left. No more groups than workers are begun at a
// time, so that the panels which pass are the same for all, and come from memory once.
class Tasks {
 public:
  int64_t group, piece;  // of the task in hand

  Tasks(uint8_t* counters, const Cut& cut, const Worker& worker)
      : counters(counters), cut(cut), worker(worker), begin(0), tried(0) {}

  bool next() {
    for (; begin < cut.groups; begin += worker.count, tried = 0) {
      int64_t begun = least(worker.count, cut.groups - begin), own = worker.index * begun / worker.count;
      for (; tried < begun; tried++) {
        group = begin + (own + tried) % begun;
        piece = __atomic_fetch_add((int64_t*)(counters + group * COUNTER_BYTES), 1, __ATOMIC_RELAXED);
        if (piece < cut.pieces) return true;
      }
    }
    return false;
  }

 private:
  uint8_t* counters;
  const Cut& cut;
  const Worker& worker;
  int64_t begin, tried;
};

}  // namespace
}  // namespace localllm::LANE
