// The rows of a step and their states, as kernels/ops/state.py defines them.
#pragma once

#include "../vectors/convert.h"

namespace localllm::VARIANT {
namespace {

struct StateRow {
  int64_t begin, end;  // tokens
  float* stored;       // the state in the row's slot; null: the new state is not written
  bool continues;      // false: the row begins with zeros
};

// `size`: numbers of a state.
static inline StateRow state_row(const StateRows& rows, int64_t row, float* states, int64_t size) {
  int64_t begin = rows.row_starts[row], end = rows.row_starts[row + 1];
  float* stored = rows.slots[row] < 0 || begin == end ? nullptr : states + rows.slots[row] * size;
  return {begin, end, stored, stored && rows.context_lens[row] > end - begin};
}

// to[i] = from[i]; from null: zeros.
static inline void copy_floats(const float* from, float* to, int64_t count) {
  if (from) memcpy(to, from, count * sizeof(float));
  else memset(to, 0, count * sizeof(float));
}

}  // namespace
}  // namespace localllm::VARIANT
