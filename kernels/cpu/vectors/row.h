// Loops over the vectors of a row. The functions are static, like all code that several ISA variants include (see
// vec.h).
#pragma once

#include "vec.h"

namespace localllm::VARIANT {

struct Full {};  // passed in place of an element count: a full vector of WIDTH elements

template <class T>
static inline F32 load(const T* p, Full) { return load(p); }
template <class T>
static inline void store(T* p, F32 x, Full) { store(p, x); }

// Calls body(i, n) for every vector of [begin, end). n is Full, or an element count for a shorter last vector.
template <class Body>
static inline void each_vector(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + WIDTH <= end; i += WIDTH) body(i, Full());
  if (i < end) body(i, (int)(end - i));
}

}  // namespace localllm::VARIANT
