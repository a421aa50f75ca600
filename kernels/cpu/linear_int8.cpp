// Products with int8 weights (W8A8): each row of activations becomes int8 with a scale of its own, the sums are whole.

#include "ahead.h"
#include "linear.h"
#include "quantised.h"

namespace localllm::LANE {
namespace {

constexpr int64_t CHUNK = 512;  // rows at a time: bounds the memory for activations
constexpr int64_t BLOCK = 512;  // inputs at a time: 16 KB of a panel stay in the first cache from tile to tile
constexpr int64_t STEP = PANEL * 4;  // bytes of four inputs of a panel
constexpr int64_t ALONE = 2;    // up to so many rows every worker makes its own copy, which is cheaper than a barrier
#if defined(__AVX512F__)
constexpr int MOST = 12;  // rows of a tile, bound by registers
#elif defined(__AVXVNNI__)
constexpr int MOST = 6;
#else
constexpr int MOST = 4;
#endif

struct Activations {
  uint8_t* whole;  // tile after tile (quantised.h), SHIFT added
  float* largest;  // [rows] magnitudes; 127 of each row's whole numbers
};

int64_t depth_of(const LinearArgs& args) { return padded_ins(Format::int8, args.ins, args.group); }

Activations activations_at(void* memory, int64_t rows, int64_t depth) {
  return {(uint8_t*)memory, (float*)((char*)memory + round_up(rows * depth, 64))};
}

size_t activation_bytes(int64_t rows, int64_t depth) { return round_up(rows * depth, 64) + round_up(rows * 4, 64); }

template <class T>
const T* row_of(const LinearArgs& args, int64_t row) { return (const T*)args.x + row * args.x_stride; }

float largest_of_row(const LinearArgs& args, int64_t row) {
  float most = 0;
  with_type(args.x_type, [&](auto sample) { most = largest_of(row_of<decltype(sample)>(args, row), args.ins); });
  return most;
}

// Inputs [begin, begin + 64) of the rows of a tile.
void fill(const LinearArgs& args, const Activations& to, const Tiles& tiles, int64_t first, int64_t tile,
          int64_t begin, int64_t depth) {
  int64_t row = tiles.begin(tile), size = tiles.size(tile);
  alignas(64) int8_t whole[MOST][64];
  for (int64_t r = 0; r < size; r++) {
    with_type(args.x_type, [&](auto sample) {
      auto* x = row_of<decltype(sample)>(args, first + row + r) + begin;
      whole_numbers(whole[r], x, args.ins - begin, 64, inverse_of(to.largest[row + r]));
    });
  }
  scatter(to.whole + row * depth + begin * size, size, whole[0], 64, SHIFT * 0x01010101u);
}

// sums[r][j] += a tile of R rows times V vectors of outputs, over `steps` of four inputs.
template <int R, int V>
void multiply(const int8_t* weight, const uint8_t* x, int64_t steps, int32_t* sums, Ahead ahead) {
  I32 acc[R][V];
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) acc[r][v] = load_whole(sums + r * PANEL + v * WIDTH);
  }
  for (int64_t step = 0; step < steps; step++, weight += STEP, x += R * 4, ahead.at += ahead.by) {
    for (int line = 0; line < V * WIDTH * 4; line += 64) __builtin_prefetch(ahead.at + line);
    I32 w[V];
    for (int v = 0; v < V; v++) w[v] = load_whole(weight + v * WIDTH * 4);
    for (int r = 0; r < R; r++) {
      I32 words = repeat(x + r * 4);
      for (int v = 0; v < V; v++) acc[r][v] = dot_signed(acc[r][v], words, w[v]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) store_whole(sums + r * PANEL + v * WIDTH, acc[r][v]);
  }
}

// One panel times some tiles of activations; `sums` is room for [rows of them][PANEL].
void panel_product(const LinearArgs& args, const Activations& from, const Tiles& tiles, int64_t first, int64_t panel,
                   int64_t begin, int64_t end, int32_t* sums) {
  int64_t depth = depth_of(args), row = tiles.begin(begin), rows = tiles.begin(end) - row;
  const int8_t* weight = (const int8_t*)args.weight + panel * panel_bytes(Format::int8, args.ins, args.group);
  const int32_t* totals = (const int32_t*)(weight + depth * PANEL);
  const float* scales = (const float*)(totals + PANEL);
  memset(sums, 0, rows * PANEL * 4);
  int64_t block = end - begin > 1 ? BLOCK : depth;
  for (int64_t k = 0; k < depth; k += block) {
    int64_t steps = (depth - k < block ? depth - k : block) / 4, passes = end - begin;
    const int8_t* at_block = weight + k * PANEL;
    Ahead ahead{(const char*)at_block + (passes == 1 ? LEAD : steps * STEP), STEP / passes};
    for (int64_t tile = begin; tile < end; tile++) {
      int64_t size = tiles.size(tile), at = tiles.begin(tile);
      with_number<MOST>(size, [&](auto number) {
        constexpr int R = decltype(number)::value, V = R <= 2 ? PANEL / WIDTH : 2;
        for (int j = 0; j < PANEL; j += V * WIDTH) {
          multiply<R, V>(at_block + j * 4, from.whole + at * depth + k * R, steps, sums + (at - row) * PANEL + j,
                         {ahead.at + j * 4, ahead.by});
        }
      });
      ahead.at += steps * ahead.by;
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    alignas(64) float values[PANEL];
    for (int j = 0; j < PANEL; j += WIDTH) {
      I32 sum = load_whole(sums + r * PANEL + j);
      if (SHIFT) sum = sum - (load_whole(totals + j) << 7);
      store(values + j, to_float(sum) * (set1(from.largest[row + r] / 127.0f) * load(scales + j)));
    }
    put(args, first + row + r, panel, values);
  }
}

}  // namespace

size_t linear_int8_shared(const LinearArgs& args, int) {
  return args.rows <= ALONE ? 0 : activation_bytes(args.rows < CHUNK ? args.rows : CHUNK, depth_of(args));
}

void linear_int8(const LinearArgs& args, const Worker& worker) {
  int64_t depth = depth_of(args), panels = round_up(args.outs, PANEL) / PANEL;
  bool alone = args.rows <= ALONE;
  for (int64_t first = 0; first < args.rows; first += CHUNK) {
    int64_t rows = args.rows - first < CHUNK ? args.rows - first : CHUNK;
    Tiles tiles(rows, MOST);
    size_t own = alone ? activation_bytes(rows, depth) : 0;
    char* scratch = (char*)worker.scratch(own + rows * PANEL * 4);
    Activations x = activations_at(alone ? scratch : args.shared, rows, depth);
    Worker filler = alone ? Worker{0, 1, worker.team} : worker;

    if (first) worker.barrier();  // nobody reads the chunk before this one any more
    Share mine = share_of(rows, filler);
    for (int64_t row = mine.begin; row < mine.end; row++) x.largest[row] = largest_of_row(args, first + row);
    if (!alone) worker.barrier();
    mine = share_of(tiles.count * (depth / 64), filler);
    for (int64_t item = mine.begin; item < mine.end; item++) {
      fill(args, x, tiles, first, item / (depth / 64), item % (depth / 64) * 64, depth);
    }
    if (!alone) worker.barrier();

    int64_t parts = parts_of(panels, tiles, worker);
    mine = share_of(panels * parts, worker);
    for (int64_t item = mine.begin; item < mine.end; item++) {
      int64_t part = item % parts;
      panel_product(args, x, tiles, first, item / parts, tiles.count * part / parts,
                    tiles.count * (part + 1) / parts, (int32_t*)(scratch + own));
    }
  }
}

void pack_int8(const PackArgs& args, const Worker& worker) {
  int64_t depth = padded_ins(Format::int8, args.ins, args.group);
  int64_t bytes = panel_bytes(Format::int8, args.ins, args.group);
  Share mine = share_of(round_up(args.outs, PANEL) / PANEL, worker);
  for (int64_t panel = mine.begin; panel < mine.end; panel++) {
    int8_t* to = (int8_t*)args.packed + panel * bytes;
    int32_t* totals = (int32_t*)(to + depth * PANEL);
    float* scales = (float*)(totals + PANEL);
    memset(to, 0, bytes);
    for (int64_t j = 0; j < PANEL && panel * PANEL + j < args.outs; j++) {
      int64_t out = panel * PANEL + j;
      const int8_t* from = (const int8_t*)args.data + out * args.ins;
      for (int64_t k = 0; k < args.ins; k++) {
        to[k / 4 * PANEL * 4 + j * 4 + k % 4] = from[k];
        totals[j] += from[k];
      }
      scales[j] = ((const float*)args.scales)[out];
    }
  }
}

}  // namespace localllm::LANE
