// Products with int4 weights (W4A8): activations are quantised to int8 with one scale per row and group of inputs; sums
// within a group are integers. int4_weights.h has the product with float activations (W4A16).

#include "int4_panel.h"
#include "linear.h"
#include "int4_weights.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t CHUNK = 512;  // rows at a time; limits the memory for activations
// With up to 2 rows, every worker quantises a copy of its own and needs no barrier.
constexpr int64_t MAX_PRIVATE_ROWS = 2;

// Quantises one group of inputs for the rows of a tile. `quantised` is working memory: a group for each row, and one
// vector.
void fill(const LinearArgs& args, const Activations& to, const Tiles& tiles, int64_t first, int64_t tile,
          int64_t group, int8_t* quantised) {
  int64_t depth = depth_of(args), begin = group * args.group, row = tiles.begin(tile), size = tiles.size(tile);
  int64_t n = args.in_features - begin < args.group ? args.in_features - begin : args.group;
  for (int64_t r = 0; r < size; r++) {
    float magnitude = 0;
    with_type(args.x_type, [&](auto sample) {
      auto* x = row_of<decltype(sample)>(args, first + row + r) + begin;
      magnitude = largest_of(x, n);
      quantise(quantised + r * args.group, x, n, args.group, inverse_of(magnitude));
    });
    int32_t sum = 0;
    for (int64_t i = 0; i < args.group; i++) sum += quantised[r * args.group + i];
    int64_t index = row * (depth / args.group) + group * size + r;
    to.scales[index] = magnitude / 127.0f;
    to.sums[index] = (float)sum;
  }
  scatter(to.quantised + row * depth + begin * size, size, args.group, 0,
          [&](int r) { return quantised + r * args.group; });
}

}  // namespace

size_t linear_int4_shared(const LinearArgs& args, int) {
  if (args.wide) return expanded_shared<Nibbles>(args);
  int64_t rows = args.rows < CHUNK ? args.rows : CHUNK;
  return rows <= MAX_PRIVATE_ROWS ? 0 : activation_bytes(rows, depth_of(args), args.group);
}

void linear_int4(const LinearArgs& args, const Worker& worker) {
  if (args.wide) return expanded_product<Nibbles>(args, worker);
  int64_t depth = depth_of(args), groups = depth / args.group, panels = round_up(args.out_features, PANEL) / PANEL;
  bool private_copy = args.rows <= MAX_PRIVATE_ROWS;
  for (int64_t first = 0; first < args.rows; first += CHUNK) {
    int64_t rows = args.rows - first < CHUNK ? args.rows - first : CHUNK;
    Tiles tiles(rows, MAX_TILE_ROWS);
    size_t x_bytes = private_copy ? activation_bytes(rows, depth, args.group) : 0;
    size_t sums_bytes = round_up(rows * PANEL * 4, 64);
    char* scratch = (char*)worker.scratch(x_bytes + sums_bytes + groups_in_block(args) * args.group * PANEL);
    Activations x = activations_at(private_copy ? scratch : args.shared, rows, depth, args.group);
    PanelMemory memory = {(float*)(scratch + x_bytes), (uint8_t*)scratch + x_bytes + sums_bytes};

    if (first) worker.barrier();  // all workers have finished reading the previous chunk
    Share share = share_of(tiles.count * groups, private_copy ? Worker{0, 1, worker.team} : worker);
    for (int64_t item = share.begin; item < share.end; item++) {
      fill(args, x, tiles, first, item / groups, item % groups, (int8_t*)memory.bytes);
    }
    if (!private_copy) worker.barrier();

    int64_t splits = splits_of(panels, tiles, worker);
    for (Chunks chunks(panels * splits, worker); chunks.next();) {
      for (int64_t item = chunks.begin; item < chunks.end; item++) {
        int64_t split = item % splits;
        panel_product(args, x, tiles, first, item / splits, tiles.count * split / splits,
                      tiles.count * (split + 1) / splits, memory);
      }
    }
  }
}

void pack_int4(const PackArgs& args, const Worker& worker) {
  int64_t groups = padded_in_features(Format::int4, args.in_features, args.group) / args.group;
  int64_t row_bytes = (args.in_features + 1) / 2;
  int64_t group_bytes = PANEL * 3 + args.group * PANEL / 2;
  Share share = share_of(round_up(args.out_features, PANEL) / PANEL, worker);
  for (int64_t panel = share.begin; panel < share.end; panel++) {
    uint8_t* to = (uint8_t*)args.packed + panel * groups * group_bytes;
    memset(to, 0, groups * group_bytes);
    for (int64_t j = 0; j < PANEL && panel * PANEL + j < args.out_features; j++) {
      int64_t out = panel * PANEL + j;
      const uint8_t* from = (const uint8_t*)args.data + out * row_bytes;
      for (int64_t g = 0; g < groups; g++) {
        uint8_t* group = to + g * group_bytes;
        memcpy(group + j * 2, (const f16*)args.scales + out * groups + g, 2);
        group[PANEL * 2 + j] = args.zeros[out * groups + g];
        int64_t n = args.in_features - g * args.group < args.group ? args.in_features - g * args.group : args.group;
        for (int64_t i = 0; i < n; i++) {
          int64_t k = g * args.group + i;
          uint8_t nibble = from[k / 2] >> 4 * (k % 2) & 15;
          group[PANEL * 3 + i / 4 * 64 + j % 16 * 4 + i % 4] |= nibble << (j < 16 ? 0 : 4);
        }
      }
    }
  }
}

}  // namespace localllm::VARIANT
