// Products with int8 weights (W8A8): activations are quantised to int8 with one scale per row; sums are integers.

#include "int8_panel.h"
#include "linear.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t CHUNK = 512;  // rows at a time; limits the memory for activations
// With up to 2 rows, every worker quantises a copy of its own and needs no barrier.
constexpr int64_t MAX_PRIVATE_ROWS = 2;

float largest_of_row(const LinearArgs& args, int64_t row) {
  float magnitude = 0;
  with_type(args.x_type,
            [&](auto sample) { magnitude = largest_of(row_of<decltype(sample)>(args, row), args.in_features); });
  return magnitude;
}

// Quantises the inputs [begin, begin + 64) of the rows of a tile.
void fill(const LinearArgs& args, const Activations& to, const Tiles& tiles, int64_t first, int64_t tile,
          int64_t begin, int64_t depth) {
  int64_t row = tiles.begin(tile), size = tiles.size(tile);
  alignas(64) int8_t quantised[MAX_TILE_ROWS][64];
  for (int64_t r = 0; r < size; r++) {
    with_type(args.x_type, [&](auto sample) {
      auto* x = row_of<decltype(sample)>(args, first + row + r) + begin;
      quantise(quantised[r], x, args.in_features - begin, 64, inverse_of(to.largest[row + r]));
    });
  }
  scatter(to.quantised + row * depth + begin * size, size, 64, SHIFT * 0x01010101u,
          [&](int r) { return quantised[0] + r * 64; });
}

}  // namespace

size_t linear_int8_shared(const LinearArgs& args, int) {
  return args.rows <= MAX_PRIVATE_ROWS ? 0 : activation_bytes(args.rows < CHUNK ? args.rows : CHUNK, depth_of(args));
}

void linear_int8(const LinearArgs& args, const Worker& worker) {
  int64_t depth = depth_of(args), panels = round_up(args.out_features, PANEL) / PANEL;
  bool private_copy = args.rows <= MAX_PRIVATE_ROWS;
  for (int64_t first = 0; first < args.rows; first += CHUNK) {
    int64_t rows = args.rows - first < CHUNK ? args.rows - first : CHUNK;
    Tiles tiles(rows, MAX_TILE_ROWS);
    size_t x_bytes = private_copy ? activation_bytes(rows, depth) : 0;
    char* scratch = (char*)worker.scratch(x_bytes + rows * PANEL * 4);
    Activations x = activations_at(private_copy ? scratch : args.shared, rows, depth);
    Worker filler = private_copy ? Worker{0, 1, worker.team} : worker;

    if (first) worker.barrier();  // all workers have finished reading the previous chunk
    Share share = share_of(rows, filler);
    for (int64_t row = share.begin; row < share.end; row++) x.largest[row] = largest_of_row(args, first + row);
    if (!private_copy) worker.barrier();
    share = share_of(tiles.count * (depth / 64), filler);
    for (int64_t item = share.begin; item < share.end; item++) {
      fill(args, x, tiles, first, item / (depth / 64), item % (depth / 64) * 64, depth);
    }
    if (!private_copy) worker.barrier();

    int64_t splits = splits_of(panels, tiles, worker);
    for (Chunks chunks(panels * splits, worker); chunks.next();) {
      for (int64_t item = chunks.begin; item < chunks.end; item++) {
        int64_t split = item % splits;
        panel_product(args, x, tiles, first, item / splits, tiles.count * split / splits,
                      tiles.count * (split + 1) / splits, (int32_t*)(scratch + x_bytes));
      }
    }
  }
}

void pack_int8(const PackArgs& args, const Worker& worker) {
  int64_t depth = padded_in_features(Format::int8, args.in_features, args.group);
  int64_t bytes = panel_bytes(Format::int8, args.in_features, args.group);
  Share share = share_of(round_up(args.out_features, PANEL) / PANEL, worker);
  for (int64_t panel = share.begin; panel < share.end; panel++) {
    int8_t* to = (int8_t*)args.packed + panel * bytes;
    int32_t* totals = (int32_t*)(to + depth * PANEL);
    float* scales = (float*)(totals + PANEL);
    memset(to, 0, bytes);
    for (int64_t j = 0; j < PANEL && panel * PANEL + j < args.out_features; j++) {
      int64_t out = panel * PANEL + j;
      const int8_t* from = (const int8_t*)args.data + out * args.in_features;
      for (int64_t k = 0; k < args.in_features; k++) {
        to[k / 4 * PANEL * 4 + j * 4 + k % 4] = from[k];
        totals[j] += from[k];
      }
      scales[j] = ((const float*)args.scales)[out];
    }
  }
}

}  // namespace localllm::VARIANT
