// Products with int4 weights (W4A8): activations are quantised to int8 with one scale per row and group of inputs; sums
// within a group are integers. nibbles.h has the product with float activations (W4A16).

#include "linear.h"
#include "nibbles.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t CHUNK = 512;               // rows at a time; limits the memory for activations
constexpr int64_t BLOCK = 512;               // inputs at a time, at least one group; stays in the L1 cache
// With up to 2 rows, every worker quantises a copy of its own and needs no barrier.
constexpr int64_t MAX_PRIVATE_ROWS = 2;
// With up to 4 tiles, each tile unpacks the weights again, which is faster than to store them.
constexpr int64_t MAX_REPEATED_UNPACKS = 4;
#if defined(__AVX512F__)
constexpr int MAX_TILE_ROWS = 12;  // limited by the number of registers
#elif defined(__AVXVNNI__)
constexpr int MAX_TILE_ROWS = 6;
#else
constexpr int MAX_TILE_ROWS = 4;
#endif

struct Activations {
  uint8_t* quantised;  // per tile: [steps][rows of the tile], 4 bytes each (quantised.h)
  float* scales;       // per tile: [groups][rows of the tile]
  float* sums;         // sums of the quantised values, in the layout of scales
};

int64_t depth_of(const LinearArgs& args) { return padded_in_features(Format::int4, args.in_features, args.group); }

int64_t groups_in_block(const LinearArgs& args) { return BLOCK > args.group ? BLOCK / args.group : 1; }

size_t activation_bytes(int64_t rows, int64_t depth, int64_t group) {
  return round_up(rows * depth, 64) + 2 * round_up(rows * (depth / group) * 4, 64);
}

Activations activations_at(void* memory, int64_t rows, int64_t depth, int64_t group) {
  char* scales = (char*)memory + round_up(rows * depth, 64);
  return {(uint8_t*)memory, (float*)scales, (float*)(scales + round_up(rows * (depth / group) * 4, 64))};
}

// Quantises one group of inputs for the rows of a tile. `quantised` is working memory: a group for each row, and one
// vector.
void fill(const LinearArgs& args, const Activations& to, const Tiles& tiles, int64_t first, int64_t tile,
          int64_t group, int8_t* quantised) {
  int64_t depth = depth_of(args), begin = group * args.group, row = tiles.begin(tile), size = tiles.size(tile);
  int64_t n = args.in_features - begin < args.group ? args.in_features - begin : args.group;
  for (int64_t r = 0; r < size; r++) {
    float magnitude = 0;
    with_type(args.x_type, [&](auto sample) {
      auto* x = (const decltype(sample)*)args.x + (first + row + r) * args.x_stride + begin;
      magnitude = largest_of(x, n);
      quantise(quantised + r * args.group, x, n, args.group, inverse_of(magnitude));
    });
    int32_t sum = 0;
    for (int64_t i = 0; i < args.group; i++) sum += quantised[r * args.group + i];
    int64_t index = row * (depth / args.group) + group * size + r;
    to.scales[index] = magnitude / 127.0f;
    to.sums[index] = (float)sum;
  }
  scatter(to.quantised + row * depth + begin * size, size, quantised, args.group, 0);
}

// Loads weights of four inputs as unsigned bytes: one vector for the outputs from j on, one for those from j + 16 on.
struct Packed {
  static constexpr int STRIDE = PANEL * 2;
  static void load(const uint8_t* from, I32 (&w)[2]) {
    prefetch_weights(from);
    I32 both = load_words(from), low = broadcast(0x0f0f0f0f);
    w[0] = both & low;
    w[1] = both >> 4 & low;
  }
};
struct Unpacked {  // weights that unpack() has written
  static constexpr int STRIDE = PANEL * 4;
  static void load(const uint8_t* from, I32 (&w)[2]) {
    w[0] = load_words(from);
    w[1] = load_words(from + 64);
  }
};

// acc [R][2] += R rows of x × two vectors of outputs, over `steps` steps of four inputs.
template <int R, class Weight>
inline void multiply(const uint8_t* weight, const uint8_t* x, int64_t steps, I32 (&acc)[R][2]) {
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)
  for (; steps > 0; steps -= 8) {  // the sum of 8 steps, at most 8 * 2 * 15 * 127, fits in 16 bits
    I32 sums[R][2] = {};
    for (int step = 0; step < 8; step++, weight += Weight::STRIDE, x += R * 4) {
      I32 w[2];
      Weight::load(weight, w);
      for (int r = 0; r < R; r++) {
        I32 words = broadcast_word(x + r * 4);
        for (int v = 0; v < 2; v++) {
          sums[r][v] = in_place({_mm256_add_epi16(sums[r][v].v, _mm256_maddubs_epi16(w[v].v, words.v))});
        }
      }
    }
    for (int r = 0; r < R; r++) {
      for (int v = 0; v < 2; v++) {
        acc[r][v].v = _mm256_add_epi32(acc[r][v].v, _mm256_madd_epi16(sums[r][v].v, _mm256_set1_epi16(1)));
      }
    }
  }
#else
  for (; steps > 0; steps--, weight += Weight::STRIDE, x += R * 4) {
    I32 w[2];
    Weight::load(weight, w);
    for (int r = 0; r < R; r++) {
      I32 words = broadcast_word(x + r * 4);
      for (int v = 0; v < 2; v++) acc[r][v] = in_place(dot(acc[r][v], w[v], words));
    }
  }
#endif
}

// sums [R][PANEL] += a tile of R rows × one group of a panel.
template <int R, class Weight>
void group_product(const uint8_t* group, const uint8_t* weight, const uint8_t* x, const float* scales,
                   const float* totals, int64_t inputs, float* sums) {
  for (int j = 0; j < 16; j += WIDTH) {
    I32 acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zeros();
    multiply<R, Weight>(weight + j * 4, x, inputs / 4, acc);
    for (int v = 0; v < 2; v++) {
      F32 scale = load((const f16*)group + v * 16 + j), point = zero() - load_bytes(group + PANEL * 2 + v * 16 + j);
      for (int r = 0; r < R; r++) {
        float* to = sums + r * PANEL + v * 16 + j;
        F32 quantised = fma(point, set1(totals[r]), to_float(acc[r][v]));
        store(to, fma(quantised, scale * set1(scales[r]), load(to)));
      }
    }
  }
}

void unpack(const uint8_t* nibbles, int64_t inputs, uint8_t* bytes) {
  for (int64_t k = 0; k < inputs; k += 4, nibbles += PANEL * 2, bytes += PANEL * 4) {
    for (int j = 0; j < 16; j += WIDTH) {
      I32 w[2];
      Packed::load(nibbles + j * 4, w);
      store_words(bytes + j * 4, w[0]);
      store_words(bytes + 64 + j * 4, w[1]);
    }
  }
}

struct PanelMemory {  // memory of a worker, for one panel
  float* sums;     // [rows][PANEL]
  uint8_t* bytes;  // an unpacked block of the panel
};

// Multiplies one panel with the tiles [begin, end) and writes the outputs.
void panel_product(const LinearArgs& args, const Activations& from, const Tiles& tiles, int64_t first, int64_t panel,
                   int64_t begin, int64_t end, const PanelMemory& memory) {
  int64_t depth = depth_of(args), groups = depth / args.group, block = groups_in_block(args);
  int64_t row = tiles.begin(begin), rows = tiles.begin(end) - row;
  int64_t group_bytes = PANEL * 3 + args.group * PANEL / 2;
  const uint8_t* weight = (const uint8_t*)args.weight + panel * groups * group_bytes;
  bool unpacks_once = end - begin > MAX_REPEATED_UNPACKS;
  memset(memory.sums, 0, rows * PANEL * 4);
  for (int64_t first_group = 0; first_group < groups; first_group += block) {
    int64_t end_group = first_group + block < groups ? first_group + block : groups;
    for (int64_t g = first_group; g < end_group && unpacks_once; g++) {
      unpack(weight + g * group_bytes + PANEL * 3, args.group, memory.bytes + (g - first_group) * args.group * PANEL);
    }
    for (int64_t tile = begin; tile < end; tile++) {
      int64_t first_row = tiles.begin(tile);
      with_number<MAX_TILE_ROWS>(tiles.size(tile), [&](auto number) {
        constexpr int R = decltype(number)::value;
        for (int64_t g = first_group; g < end_group; g++) {
          const uint8_t *group = weight + g * group_bytes, *x = from.quantised + first_row * depth + g * args.group * R;
          const float *scales = from.scales + first_row * groups + g * R;
          const float *totals = from.sums + first_row * groups + g * R;
          float* sums = memory.sums + (first_row - row) * PANEL;
          if (unpacks_once) {
            const uint8_t* bytes = memory.bytes + (g - first_group) * args.group * PANEL;
            group_product<R, Unpacked>(group, bytes, x, scales, totals, args.group, sums);
          } else {
            group_product<R, Packed>(group, group + PANEL * 3, x, scales, totals, args.group, sums);
          }
        }
      });
    }
  }
  for (int64_t r = 0; r < rows; r++) write_outputs(args, first + row + r, panel, memory.sums + r * PANEL);
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
