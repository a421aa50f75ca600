// The value down to which tokens stay in a draw, without sorting them: the k-th largest, or the last of a nucleus.
#pragma once

#include "vec.h"

namespace localllm::LANE {

// The smallest of values[count] such that all strictly larger ones together weigh less than `target`; the largest of
// them in any case. With weights of 1 and target k that is the k-th largest. Values are finite, weights positive, and
// count is at least 1; both are put in another order, side by side.
//
// Each turn sorts into bins the values among which the answer still is, and goes on with those of one bin.
static inline float least_kept(float* values, float* weights, int64_t count, double target) {
  constexpr int BINS = 256;
  double before = 0;  // weight of what is larger than all that is left
  for (;;) {
    F32 highs = set1(values[0]), lows = highs;
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
      highs = max(highs, load(values + i));
      lows = min(lows, load(values + i));
    }
    float high = largest(highs), low = -largest(zero() - lows);
    for (; i < count; i++) {
      high = values[i] > high ? values[i] : high;
      low = values[i] < low ? values[i] : low;
    }
    if (high == low) return low;
    double scale = (BINS - 1) / ((double)high - low);
    auto bin_of = [&](float value) { return (int)(((double)high - value) * scale); };
    double even[BINS] = {}, odd[BINS] = {};  // neighbours often meet in a bin, and would wait for each other
    for (i = 0; i + 1 < count; i += 2) {
      even[bin_of(values[i])] += weights[i];
      odd[bin_of(values[i + 1])] += weights[i + 1];
    }
    if (i < count) even[bin_of(values[i])] += weights[i];
    int chosen = 0;  // where the largest value is
    double above = before;
    for (int bin = 0; bin < BINS && (bin == 0 || above < target); bin++) {
      if (even[bin] + odd[bin] == 0) continue;
      chosen = bin;
      before = above;
      above += even[bin] + odd[bin];
    }
    int64_t kept = 0;
    for (i = 0; i < count; i++) {
      if (bin_of(values[i]) != chosen) continue;
      float value = values[i], weight = weights[i];
      values[i] = values[kept];
      weights[i] = weights[kept];
      values[kept] = value;
      weights[kept++] = weight;
    }
    count = kept;
  }
}

}  // namespace localllm::LANE
