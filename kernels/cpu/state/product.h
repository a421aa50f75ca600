// Small float products, out [m, n] = a [m, k] · b [k, n] or out += a · b, of matrices in the L2 cache. n is a multiple
// of WIDTH.
#pragma once

#include "../vectors/vec.h"

namespace localllm::VARIANT {
namespace {

// Rows of a tile, and its vectors of columns: the sums stay in registers.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 2;
#else
constexpr int TILE_ROWS = 2, TILE_VECTORS = 2;
#endif

struct Matrix {
  float* data;
  int64_t stride;
  float* row(int64_t i) const { return data + i * stride; }
};

template <bool ADD, int ROWS, int VECTORS>
static inline void product_tile(float* out, int64_t out_stride, const float* a, int64_t a_stride, const float* b,
                                int64_t b_stride, int64_t k) {
  F32 sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sums[r][v] = ADD ? load(out + r * out_stride + v * WIDTH) : zero();
  }
  for (int64_t i = 0; i < k; i++) {
    F32 right[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) right[v] = load(b + i * b_stride + v * WIDTH);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      F32 left = set1(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(left, right[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(out + r * out_stride + v * WIDTH, sums[r][v]);
  }
}

// Some rows of a product, from `row` on.
template <bool ADD, int ROWS>
static inline void product_rows(Matrix out, Matrix a, Matrix b, int64_t row, int64_t k, int64_t n) {
  int64_t column = 0;
  for (; column + TILE_VECTORS * WIDTH <= n; column += TILE_VECTORS * WIDTH)
    product_tile<ADD, ROWS, TILE_VECTORS>(out.row(row) + column, out.stride, a.row(row), a.stride, b.data + column,
                                          b.stride, k);
  for (; column < n; column += WIDTH)
    product_tile<ADD, ROWS, 1>(out.row(row) + column, out.stride, a.row(row), a.stride, b.data + column, b.stride, k);
}

// Calls body<ROWS>(row) for all rows [row, end), TILE_ROWS at a time, then fewer.
template <int ROWS = TILE_ROWS, class Body>
static inline void each_row_tile(int64_t row, int64_t end, Body body) {
  for (; row + ROWS <= end; row += ROWS) body.template operator()<ROWS>(row);
  if constexpr (ROWS > 1) each_row_tile<(ROWS > 4 ? 4 : ROWS / 2)>(row, end, body);
}

template <bool ADD>
static inline void product(Matrix out, Matrix a, Matrix b, int64_t m, int64_t k, int64_t n) {
  each_row_tile(0, m, [=]<int ROWS>(int64_t row) { product_rows<ADD, ROWS>(out, a, b, row, k, n); });
}

}  // namespace
}  // namespace localllm::VARIANT
