// Functions that the products of quantised weights share: tiles of rows, quantised activations, outputs.
#pragma once

#include "../vectors/integer.h"
#include "rows.h"
#include "../vectors/transpose.h"

namespace localllm::VARIANT {

// Division of rows into tiles of at most `max_rows` rows and about equal size. The activations of a tile are stored as
// [steps][rows of the tile], one 4-byte word (four int8 or a float) each.
struct Tiles {
  int64_t rows, count;
  Tiles(int64_t rows, int64_t max_rows) : rows(rows), count((rows + max_rows - 1) / max_rows) {}
  int64_t begin(int64_t tile) const { return rows * tile / count; }
  int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
};

// The number of splits into which the tiles of a panel are divided: more than 1 if there are too few panels for an even
// division of the work.
static inline int64_t splits_of(int64_t panels, const Tiles& tiles, const Worker& worker) {
  if (panels >= 4 * worker.count) return 1;
  int64_t splits = (4 * worker.count + panels - 1) / panels;
  return splits < tiles.count ? splits : tiles.count;
}

template <int N>
struct Number { static constexpr int value = N; };

// Calls f(Number<n>{}), so that n (1…N) is a compile-time constant.
template <int N, class F>
static inline void with_number(int64_t n, F f) {
  if constexpr (N > 1) {
    if (n < N) return with_number<N - 1>(n, f);
  }
  f(Number<N>{});
}

template <class F>
static inline void with_type(Type type, F f) {  // calls f with a value of that type
  switch (type) {
    case Type::f32: return f(float{});
    case Type::bf16: return f(bf16{});
    case Type::f16: return f(f16{});
  }
}

template <class T>
// Loads the first min(n, WIDTH) elements; the rest of the vector is zero.
static inline F32 load_some(const T* p, int64_t n) {
  return n >= WIDTH ? load(p) : load(p, n > 0 ? (int)n : 0);
}

// The largest magnitude of n values; NaN if one of them is NaN or infinite.
template <class T>
static inline float largest_of(const T* x, int64_t n) {
  F32 magnitudes = zero(), not_finite = zero();
  for (int64_t i = 0; i < n; i += WIDTH) {
    F32 value = load_some(x + i, n - i);
    magnitudes = max(magnitudes, max(value, zero() - value));
    not_finite = fma(value, zero(), not_finite);
  }
  return largest(magnitudes) + sum(not_finite);
}

// The factor that maps the largest magnitude to 127. For NaN it is 0: the scale makes the outputs of such a row NaN.
static inline float inverse_of(float largest) { return largest > 0 ? 127.0f / largest : 0.0f; }

// out[i] = x[i] * inverse, rounded to the nearest integer (ties to even), for `count` (a multiple of 32) elements. x
// has n elements; the rest are zero.
template <class T>
static inline void quantise(int8_t* out, const T* x, int64_t n, int64_t count, float inverse) {
  for (int64_t i = 0; i < count; i += WIDTH) {
    F32 value = round(load_some(x + i, n - i) * set1(inverse));
    store_bytes(out + i, min(max(value, set1(-127.0f)), set1(127.0f)));
  }
}

// Transposes `size` rows of `bytes` bytes into the layout of a tile (see Tiles), in 4-byte words; address(r) is the
// address of row r, which has a multiple of 4 * WIDTH readable bytes. XORs each word with `flip`.
template <class Address>
static inline void scatter(uint8_t* tile, int64_t size, int64_t bytes, uint32_t flip, Address address) {
  for (int64_t i = 0; i < bytes; i += 4 * WIDTH) {
    store_transposed((int)size, (bytes - i) / 4, (float*)(tile + i * size), [&](int row) {
      I32 words = load_words(address(row) + i);
      return as_float(flip ? words ^ broadcast((int32_t)flip) : words);
    });
  }
}

// Writes the 32 values of a panel, plus the bias, to row `row` of the output.
static inline void write_outputs(const LinearArgs& args, int64_t row, int64_t panel, const float* values) {
  int64_t first = panel * PANEL, n = args.out_features - first < PANEL ? args.out_features - first : PANEL;
  with_type(args.out_type, [&](auto sample) {
    auto* out = (decltype(sample)*)args.out + row * args.out_stride + first;
    for (int64_t j = 0; j < n; j += WIDTH) {
      F32 value = load(values + j);
      if (args.bias) value = value + load_some(args.bias + first + j, n - j);
      if (n - j >= WIDTH) store(out + j, value);
      else store(out + j, value, (int)(n - j));
    }
  });
}

}  // namespace localllm::VARIANT
