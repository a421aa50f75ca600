// A segment's activations as floats, for weight formats of products/expand.h.
#pragma once

#include "../products/expand.h"
#include "experts.h"

namespace localllm::VARIANT {
namespace {

template <class Weight>
class ExpandedRows {
 public:
  static int64_t row_bytes(const LinearArgs&) { return 0; }
  static void prepare(const LinearArgs&, int64_t, uint8_t*) {}
  static void end() {}
  static int64_t memory_bytes(const LinearArgs& product, int64_t rows) {
    return rows * PANEL * 4 + expanded_bytes(product, rows);
  }

  explicit ExpandedRows(const LinearArgs&) : tiles(1, EXPANDED_TILE_ROWS) {}

  void arrange(const LinearArgs& segment, void* memory) {
    int64_t depth = padded_in_features(Weight::format, segment.in_features, segment.group);
    tiles = Tiles(segment.rows, EXPANDED_TILE_ROWS);
    sums = (float*)memory;
    x = sums + segment.rows * PANEL;
    for (int64_t tile = 0; tile < tiles.count; tile++)
      for (int64_t begin = 0; begin < depth; begin += 32) expanded_fill(segment, x, tiles, 0, tile, begin);
  }

  void multiply(const LinearArgs& panel, const void*) const {
    expanded_panel<Weight>(panel, x, tiles, 0, 0, 0, tiles.count, sums);
  }

 private:
  Tiles tiles;
  float* sums = nullptr;
  float* x = nullptr;
};

}  // namespace
}  // namespace localllm::VARIANT
