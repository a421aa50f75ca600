// Experts with int4 weights, W4A8 and W4A16.

#include "../products/int4_panel.h"
#include "formats.h"
#include "expanded.h"
#include "../products/int4_weights.h"

namespace localllm::VARIANT {
namespace {

// A prepared row: int8 [depth], then for each group a scale and the sum of the int8 values, floats.
class Int4Rows {
 public:
  static int64_t row_bytes(const LinearArgs& product) {
    return round_up(depth_of(product) + 2 * groups_of(product) * 4, 64);
  }

  static void prepare(const LinearArgs& product, int64_t row, uint8_t* to) {
    float *scales = (float*)(to + depth_of(product)), *sums = scales + groups_of(product);
    for (int64_t group = 0; group < groups_of(product); group++) {
      int64_t begin = group * product.group, left = product.in_features - begin;
      int64_t count = left < product.group ? left : product.group;
      int8_t* quantised = (int8_t*)to + begin;
      with_type(product.x_type, [&](auto sample) {
        auto* x = row_of<decltype(sample)>(product, row) + begin;
        float largest = largest_of(x, count);
        quantise(quantised, x, count, product.group, inverse_of(largest));
        scales[group] = largest / 127.0f;
      });
      int32_t sum = 0;
      for (int64_t i = 0; i < product.group; i++) sum += quantised[i];
      sums[group] = (float)sum;
    }
  }

  static void end() {}
  static int64_t memory_bytes(const LinearArgs& product, int64_t rows) {
    return rows * PANEL * 4 + activation_bytes(rows, depth_of(product), product.group) +
           groups_in_block(product) * product.group * PANEL;
  }

  explicit Int4Rows(const LinearArgs&) : tiles(1, MAX_TILE_ROWS) {}

  void arrange(const LinearArgs& segment, void* address) {
    int64_t depth = depth_of(segment), groups = groups_of(segment), rows = segment.rows;
    tiles = Tiles(rows, MAX_TILE_ROWS);
    x = activations_at(address, rows, depth, segment.group);
    char* end = (char*)address + activation_bytes(rows, depth, segment.group);
    memory = {(float*)end, (uint8_t*)end + rows * PANEL * 4};
    for (int64_t tile = 0; tile < tiles.count; tile++) {
      int64_t first = tiles.begin(tile), size = tiles.size(tile);
      scatter(x.quantised + first * depth, size, depth, 0, [&](int r) { return row_of<uint8_t>(segment, first + r); });
      for (int64_t r = 0; r < size; r++) {
        const float* scales = (const float*)(row_of<uint8_t>(segment, first + r) + depth);
        for (int64_t group = 0; group < groups; group++) {
          int64_t index = first * groups + group * size + r;
          x.scales[index] = scales[group];
          x.sums[index] = scales[groups + group];
        }
      }
    }
  }

  void multiply(const LinearArgs& panel, const void*) const {
    panel_product(panel, x, tiles, 0, 0, 0, tiles.count, memory);
  }

 private:
  Tiles tiles;
  Activations x{};
  PanelMemory memory{};

  static int64_t groups_of(const LinearArgs& product) { return depth_of(product) / product.group; }
};

}  // namespace

size_t experts_int4_shared(const ExpertsArgs& args) { return args.wide ? 0 : shared_bytes<Int4Rows>(args); }

void experts_int4(const ExpertsArgs& args, const Worker& worker) {
  if (args.wide) return run_experts<ExpandedRows<Nibbles>>(args, worker);
  run_experts<Int4Rows>(args, worker);
}

}  // namespace localllm::VARIANT
