// Products with int8 weights (W8A8): activations are quantised to int8 with one scale per row; sums are integers.

#include "prefetch.h"
#include "linear.h"
#include "quantised.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t CHUNK = 512;           // rows at a time; limits the memory for activations
constexpr int64_t BLOCK = 512;           // inputs at a time; 16 KB of a panel stay in the L1 cache for all tiles
constexpr int64_t STEP = PANEL * 4;      // bytes of four inputs of a panel
// With up to 2 rows, every worker quantises a copy of its own and needs no barrier.
constexpr int64_t MAX_PRIVATE_ROWS = 2;
#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 12;  // limited by the number of registers
#elif defined(__AVXVNNI__)
constexpr int MAX_TILE_ROWS = 6;
#else
constexpr int MAX_TILE_ROWS = 4;
#endif

struct Activations {
  uint8_t* quantised;  // per tile: [steps][rows of the tile], 4 bytes each (quantised.h), with SHIFT added to each byte
  float* largest;      // [rows] largest magnitude of each row; its quantised value is 127
};

int64_t depth_of(const LinearArgs& args) { return padded_in_features(Format::int8, args.in_features, args.group); }

Activations activations_at(void* memory, int64_t rows, int64_t depth) {
  return {(uint8_t*)memory, (float*)((char*)memory + round_up(rows * depth, 64))};
}

size_t activation_bytes(int64_t rows, int64_t depth) { return round_up(rows * depth, 64) + round_up(rows * 4, 64); }

template <class T>
const T* row_of(const LinearArgs& args, int64_t row) { return (const T*)args.x + row * args.x_stride; }

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
  scatter(to.quantised + row * depth + begin * size, size, quantised[0], 64, SHIFT * 0x01010101u);
}

// sums [R][PANEL] += a tile of R rows × V vectors of outputs, over `steps` steps of four inputs.
template <int R, int V>
void multiply(const int8_t* weight, const uint8_t* x, int64_t steps, int32_t* sums, Prefetch prefetch) {
  I32 acc[R][V];
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) acc[r][v] = load_words(sums + r * PANEL + v * WIDTH);
  }
  for (int64_t step = 0; step < steps; step++, weight += STEP, x += R * 4, prefetch.address += prefetch.step_bytes) {
    for (int line = 0; line < V * WIDTH * 4; line += 64) __builtin_prefetch(prefetch.address + line);
    I32 w[V];
    for (int v = 0; v < V; v++) w[v] = load_words(weight + v * WIDTH * 4);
    for (int r = 0; r < R; r++) {
      I32 words = broadcast_word(x + r * 4);
      for (int v = 0; v < V; v++) acc[r][v] = dot_signed(acc[r][v], words, w[v]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) store_words(sums + r * PANEL + v * WIDTH, acc[r][v]);
  }
}

// Multiplies one panel with the tiles [begin, end) and writes the outputs. `sums` [rows of the tiles][PANEL] is working
// memory.
void panel_product(const LinearArgs& args, const Activations& from, const Tiles& tiles, int64_t first, int64_t panel,
                   int64_t begin, int64_t end, int32_t* sums) {
  int64_t depth = depth_of(args), row = tiles.begin(begin), rows = tiles.begin(end) - row;
  const int8_t* weight = (const int8_t*)args.weight + panel * panel_bytes(Format::int8, args.in_features, args.group);
  const int32_t* totals = (const int32_t*)(weight + depth * PANEL);
  const float* scales = (const float*)(totals + PANEL);
  memset(sums, 0, rows * PANEL * 4);
  int64_t block = end - begin > 1 ? BLOCK : depth;
  for (int64_t k = 0; k < depth; k += block) {
    int64_t steps = (depth - k < block ? depth - k : block) / 4, passes = end - begin;
    const int8_t* block_weights = weight + k * PANEL;
    Prefetch prefetch{(const char*)block_weights + (passes == 1 ? LEAD : steps * STEP), STEP / passes};
    for (int64_t tile = begin; tile < end; tile++) {
      int64_t size = tiles.size(tile), first_row = tiles.begin(tile);
      with_number<MAX_TILE_ROWS>(size, [&](auto number) {
        constexpr int R = decltype(number)::value, V = R <= 2 ? PANEL / WIDTH : 2;
        for (int j = 0; j < PANEL; j += V * WIDTH) {
          multiply<R, V>(block_weights + j * 4, from.quantised + first_row * depth + k * R, steps,
                         sums + (first_row - row) * PANEL + j, {prefetch.address + j * 4, prefetch.step_bytes});
        }
      });
      prefetch.address += steps * prefetch.step_bytes;
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    alignas(64) float values[PANEL];
    for (int j = 0; j < PANEL; j += WIDTH) {
      I32 sum = load_words(sums + r * PANEL + j);
      if (SHIFT) sum = sum - (load_words(totals + j) << 7);
      store(values + j, to_float(sum) * (set1(from.largest[row + r] / 127.0f) * load(scales + j)));
    }
    write_outputs(args, first + row + r, panel, values);
  }
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
