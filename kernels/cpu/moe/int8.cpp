// Experts with int8 weights (W8A8).

#include "../products/int8_panel.h"
#include "formats.h"
#include "experts.h"

namespace localllm::VARIANT {
namespace {

// A prepared row: int8 [depth], then its largest magnitude as a float.
class Int8Rows {
 public:
  static int64_t row_bytes(const LinearArgs& product) { return depth_of(product) + 64; }

  static void prepare(const LinearArgs& product, int64_t row, uint8_t* to) {
    float largest = 0;
    with_type(product.x_type, [&](auto sample) {
      auto* x = row_of<decltype(sample)>(product, row);
      largest = largest_of(x, product.in_features);
      quantise((int8_t*)to, x, product.in_features, depth_of(product), inverse_of(largest));
    });
    memcpy(to + depth_of(product), &largest, sizeof largest);
  }

  static void end() {}
  static int64_t memory_bytes(const LinearArgs& product, int64_t rows) {
    return rows * PANEL * 4 + activation_bytes(rows, depth_of(product));
  }

  explicit Int8Rows(const LinearArgs&) : tiles(1, MAX_TILE_ROWS) {}

  void arrange(const LinearArgs& segment, void* memory) {
    int64_t depth = depth_of(segment);
    tiles = Tiles(segment.rows, MAX_TILE_ROWS);
    sums = (int32_t*)memory;
    x = activations_at(sums + segment.rows * PANEL, segment.rows, depth);
    for (int64_t tile = 0; tile < tiles.count; tile++) {
      int64_t first = tiles.begin(tile);
      scatter(x.quantised + first * depth, tiles.size(tile), depth, SHIFT * 0x01010101u,
              [&](int r) { return row_of<uint8_t>(segment, first + r); });
    }
    for (int64_t row = 0; row < segment.rows; row++) memcpy(x.largest + row, row_of<uint8_t>(segment, row) + depth, 4);
  }

  void multiply(const LinearArgs& panel, const void*) const {
    panel_product(panel, x, tiles, 0, 0, 0, tiles.count, sums);
  }

 private:
  Tiles tiles;
  int32_t* sums = nullptr;
  Activations x{};
};

}  // namespace

size_t experts_int8_shared(const ExpertsArgs& args) { return shared_bytes<Int8Rows>(args); }

void experts_int8(const ExpertsArgs& args, const Worker& worker) { run_experts<Int8Rows>(args, worker); }

}  // namespace localllm::VARIANT
