// The W4A8 product of tiles of rows and one panel. Activations are quantised to int8 with one scale per row and group
// of inputs; sums within a group are integers.
#pragma once

#include "../vectors/prefetch.h"
#include "quantised.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t BLOCK = 512;  // inputs at a time, at least one group; stays in the L1 cache
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

static inline int64_t depth_of(const LinearArgs& args) {
  return padded_in_features(Format::int4, args.in_features, args.group);
}

static inline int64_t groups_in_block(const LinearArgs& args) { return BLOCK > args.group ? BLOCK / args.group : 1; }

static inline size_t activation_bytes(int64_t rows, int64_t depth, int64_t group) {
  return round_up(rows * depth, 64) + 2 * round_up(rows * (depth / group) * 4, 64);
}

static inline Activations activations_at(void* memory, int64_t rows, int64_t depth, int64_t group) {
  char* scales = (char*)memory + round_up(rows * depth, 64);
  return {(uint8_t*)memory, (float*)scales, (float*)(scales + round_up(rows * (depth / group) * 4, 64))};
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

static inline void unpack(const uint8_t* nibbles, int64_t inputs, uint8_t* bytes) {
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
static inline void panel_product(const LinearArgs& args, const Activations& from, const Tiles& tiles, int64_t first,
                                 int64_t panel, int64_t begin, int64_t end, const PanelMemory& memory) {
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
}  // namespace localllm::VARIANT
