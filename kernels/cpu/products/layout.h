// The memory layout of packed weights. All ISA variants use the same layout, so one packed file works on every CPU.
//
// A weight [out_features, in_features] is stored as consecutive panels of 32 outputs; the last panel is padded with
// zeros. A product reads a panel sequentially for any number of rows. Inputs are interleaved for the dot-product
// instructions (VNNI). K is the number of inputs. The right column gives the index of output j of the panel
// and input k.
//
//   f32         [K][32]                                                       element (k, j)
//   bf16, f16   [K/2][32][2], K rounded up to 32                              (k/2, j, k%2)
//   int8        [K/4][32][4], K rounded up to 64, then                        (k/4, j, k%4)
//               int32 sums[32]  (sum over k of the weights, for products that shift the activations to unsigned)
//               float scales[32]
//   int4        per group of `group` inputs (a multiple of 32; the last group is padded):
//               half scales[32], uint8 zeros[32], then bytes [group/4][64]:   byte (k/4, (j%16)*4 + k%4), outputs
//               0..15 in the low nibble, 16..31 in the high nibble. Value = (nibble - zero) * scale.
//   fp8         per block of `group` inputs (e4m3fn; a multiple of 32, or all inputs, padded to a multiple of 32):
//               float scales[32], then bytes [group/2][32][2]                 (k/2, j, k%2)
//   mxfp4       per group of 32 inputs (K is a multiple of 32):
//               uint8 exponents[32] (e8m0), then bytes [8][64] of e2m1 numbers, in the order of int4
#pragma once

#include <cstddef>
#include <cstdint>

namespace localllm {

enum class Format : int { f32 = 0, bf16 = 1, f16 = 2, int8 = 3, int4 = 4, fp8 = 5, mxfp4 = 6 };

constexpr int FORMATS = 7;

constexpr int64_t PANEL = 32;

static constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Number of inputs in the packed layout, including padding.
static constexpr int64_t padded_in_features(Format format, int64_t in_features, int64_t group) {
  switch (format) {
    case Format::f32: return in_features;
    case Format::bf16:
    case Format::f16: return round_up(in_features, 32);
    case Format::int8: return round_up(in_features, 64);
    case Format::int4: return round_up(in_features, group);
    case Format::fp8: return round_up(round_up(in_features, group), 32);
    case Format::mxfp4: return in_features;
  }
  return 0;
}

static constexpr int64_t panel_bytes(Format format, int64_t in_features, int64_t group) {
  int64_t depth = padded_in_features(format, in_features, group);
  switch (format) {
    case Format::f32: return depth * PANEL * 4;
    case Format::bf16:
    case Format::f16: return depth * PANEL * 2;
    case Format::int8: return depth * PANEL + PANEL * 8;
    case Format::int4: return depth / group * (PANEL * 3 + group * PANEL / 2);
    case Format::fp8: return depth / round_up(group, 32) * PANEL * 4 + depth * PANEL;
    case Format::mxfp4: return depth / 32 * PANEL + depth * PANEL / 2;
  }
  return 0;
}

static constexpr int64_t packed_bytes(Format format, int64_t out_features, int64_t in_features, int64_t group) {
  return round_up(out_features, PANEL) / PANEL * panel_bytes(format, in_features, group);
}

}  // namespace localllm
