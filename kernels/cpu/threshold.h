// The value down to which tokens stay in a draw, without sorting them: the k-th largest, or the last of a nucleus.
#pragma once

#include "vec.h"

namespace localllm::LANE {

// The smallest of values[count] such that all strictly larger ones together weigh less than `target`; the largest of
// them in any case. With weights of 1 and target k that is the k-th largest. Values are finite, and count is at least
// 1; values and weights are put in another order, side by side.
//
// Each turn sorts into bins the values among which the answer still is, and keeps those of one bin.
static inline float least_kept(float* values, float* weights, int64_t count, double target) {
  constexpr int BINS = 256;
  double before = 0;  // weight of what is larger than all that is left
  for (;;) {
    float high = values[0], low = values[0];
    for (int64_t i = 1; i < count; i++) {
      high = values[i] > high ? values[i] : high;
      low = values[i] < low ? values[i] : low;
    }
    if (high == low) return low;
    double scale = (BINS - 1) / ((double)high - low);
    double weight[BINS] = {};
    int64_t members[BINS] = {};
    for (int64_t i = 0; i < count; i++) {
      int bin = (int)(((double)high - values[i]) * scale);
      weight[bin] += weights[i];
      members[bin]++;
    }
    int chosen = 0;  // the largest value is in the first bin
    double above = before;
    for (int bin = 0; bin < BINS && (bin == 0 || above < target); bin++) {
      if (!members[bin]) continue;
      chosen = bin;
      before = above;
      above += weight[bin];
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
      if ((int)(((double)high - values[i]) * scale) != chosen) continue;
      float value = values[i], own = weights[i];
      values[i] = values[kept];
      weights[i] = weights[kept];
      values[kept] = value;
      weights[kept++] = own;
    }
    count = kept;
  }
}

}  // namespace localllm::LANE
