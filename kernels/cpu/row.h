// A row one vector after the other. Static, like all that lanes share by including it (vec.h says why).
#pragma once

#include "vec.h"

namespace localllm::LANE {

struct Whole {};  // in place of a count: all WIDTH of them

template <class T>
static inline F32 load(const T* p, Whole) { return load(p); }
template <class T>
static inline void store(T* p, F32 x, Whole) { store(p, x); }

// body(i, n) for every vector of [begin, end): n is Whole but for a last, shorter one, where it counts.
template <class Body>
static inline void each_vector(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + WIDTH <= end; i += WIDTH) body(i, Whole());
  if (i < end) body(i, (int)(end - i));
}

}  // namespace localllm::LANE
