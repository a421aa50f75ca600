// The threshold of top_k (the k-th largest value) or top_p (the smallest value of the nucleus), without sorting.
#pragma once

#include "../vectors/vec.h"

namespace localllm::VARIANT {

// Returns the smallest value for which the weights of all strictly larger values sum to less than `target`; never more
// than the largest value. With weights of 1 and target k, it is the k-th largest value. Values must be finite, weights
// positive, and count at least 1. The function permutes values and weights together.
//
// Each iteration divides the remaining values into bins and continues with the values of the bin of the result.
static inline float threshold_of(float* values, float* weights, int64_t count, double target) {
  constexpr int BINS = 256;
  double before = 0;  // total weight of the values that are larger than all remaining values
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
    double even[BINS] = {}, odd[BINS] = {};  // two histograms, because neighbours often have the same bin
    for (i = 0; i + 1 < count; i += 2) {
      even[bin_of(values[i])] += weights[i];
      odd[bin_of(values[i + 1])] += weights[i + 1];
    }
    if (i < count) even[bin_of(values[i])] += weights[i];
    int chosen = 0;  // index of the bin that contains the result; bin 0 has the largest value
    double above = before;
    for (int bin = 0; bin < BINS && (bin == 0 || above < target); bin++) {
      if (even[bin] + odd[bin] == 0) continue;
      chosen = bin;
      before = above;
      above += even[bin] + odd[bin];
    }
    int64_t remaining = 0;
    for (i = 0; i < count; i++) {
      if (bin_of(values[i]) != chosen) continue;
      float value = values[i], weight = weights[i];
      values[i] = values[remaining];
      weights[i] = weights[remaining];
      values[remaining] = value;
      weights[remaining++] = weight;
    }
    count = remaining;
  }
}

}  // namespace localllm::VARIANT
