// Conversion of rows between float and the stored types.
#pragma once

#include "row.h"

namespace localllm::VARIANT {

// Calls body(p) with p cast to a pointer to `type`.
template <class Body>
static inline void as_stored(Type type, const void* p, Body body) {
  switch (type) {
    case Type::f32: return body((const float*)p);
    case Type::bf16: return body((const bf16*)p);
    case Type::f16: return body((const f16*)p);
  }
}
template <class Body>
static inline void as_stored(Type type, void* p, Body body) {
  switch (type) {
    case Type::f32: return body((float*)p);
    case Type::bf16: return body((bf16*)p);
    case Type::f16: return body((f16*)p);
  }
}

// to[i] = from[first + i], converted to float.
static inline void widen(Type type, const void* from, int64_t first, float* to, int64_t count) {
  as_stored(type, from, [=](auto* row) {
    each_vector(0, count, [=](int64_t i, auto n) { store(to + i, load(row + first + i, n), n); });
  });
}

// to[first + i] = from[i] * scale, rounded to `type`.
static inline void narrow(Type type, const float* from, float scale, void* to, int64_t first, int64_t count) {
  as_stored(type, to, [=](auto* row) {
    each_vector(0, count, [=](int64_t i, auto n) { store(row + first + i, load(from + i, n) * set1(scale), n); });
  });
}

}  // namespace localllm::VARIANT
