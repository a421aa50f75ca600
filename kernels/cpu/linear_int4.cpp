// Products with int4 weights in groups of inputs (W4A8): every group of a row of activations becomes int8 with a scale
// of its own; sums within a group are whole. Activations as they are (W4A16): nibbles.h.

#include "linear.h"
#include "nibbles.h"

namespace localllm::LANE {
namespace {

constexpr int64_t CHUNK = 512;  // rows at a time: bounds the memory for activations
constexpr int64_t BLOCK = 512;  // inputs at a time, at least one group: stay in the first cache from tile to tile
constexpr int64_t ALONE = 2;    // up to so many rows every worker makes its own copy, which is cheaper than a barrier
constexpr int64_t FEW = 4;      // tiles up to which unpacking in each of them is faster than once for all
#if defined(__AVX512F__)
constexpr int MOST = 12;  // rows of a tile, bound by registers
#elif defined(__AVXVNNI__)
constexpr int MOST = 6;
#else
constexpr int MOST = 4;
#endif

struct Activations {
  uint8_t* whole;  // tile after tile (quantised.h)
  float* scales;   // tile after tile, [group][row of the tile]
  float* sums;     // of the whole numbers, likewise
};

int64_t depth_of(const LinearArgs& args) { return padded_ins(Format::int4, args.ins, args.group); }

int64_t groups_in_block(const LinearArgs& args) { return BLOCK > args.group ? BLOCK / args.group : 1; }

size_t activation_bytes(int64_t rows, int64_t depth, int64_t group) {
  return round_up(rows * depth, 64) + 2 * round_up(rows * (depth / group) * 4, 64);
}

Activations activations_at(void* memory, int64_t rows, int64_t depth, int64_t group) {
  char* scales = (char*)memory + round_up(rows * depth, 64);
  return {(uint8_t*)memory, (float*)scales, (float*)(scales + round_up(rows * (depth / group) * 4, 64))};
}

// One group of inputs of the rows of a tile; `whole` is room for as many whole numbers, and a vector more.
void fill(const LinearArgs& args, const Activations& to, const Tiles& tiles, int64_t first, int64_t tile,
          int64_t group, int8_t* whole) {
  int64_t depth = depth_of(args), begin = group * args.group, row = tiles.begin(tile), size = tiles.size(tile);
  int64_t n = args.ins - begin < args.group ? args.ins - begin : args.group;
  for (int64_t r = 0; r < size; r++) {
    float most = 0;
    with_type(args.x_type, [&](auto sample) {
      auto* x = (const decltype(sample)*)args.x + (first + row + r) * args.x_stride + begin;
      most = largest_of(x, n);
      whole_numbers(whole + r * args.group, x, n, args.group, inverse_of(most));
    });
    int32_t sum = 0;
    for (int64_t i = 0; i < args.group; i++) sum += whole[r * args.group + i];
    int64_t at = row * (depth / args.group) + group * size + r;
    to.scales[at] = most / 127.0f;
    to.sums[at] = (float)sum;
  }
  scatter(to.whole + row * depth + begin * size, size, whole, args.group, 0);
}

// Two vectors of weights, of four inputs each, as unsigned bytes: outputs j… and j + 16….
struct Packed {
  static constexpr int STRIDE = PANEL * 2;
  static void load(const uint8_t* at, I32 (&w)[2]) {
    fetch_ahead(at);
    I32 both = load_whole(at), low = all(0x0f0f0f0f);
    w[0] = both & low;
    w[1] = both >> 4 & low;
  }
};
struct Unpacked {  // once for all tiles
  static constexpr int STRIDE = PANEL * 4;
  static void load(const uint8_t* at, I32 (&w)[2]) {
    w[0] = load_whole(at);
    w[1] = load_whole(at + 64);
  }
};

// acc[r] += R rows times two vectors of outputs, `steps` of four inputs long.
template <int R, class Weight>
inline void multiply(const uint8_t* weight, const uint8_t* x, int64_t steps, I32 (&acc)[R][2]) {
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)
  for (; steps > 0; steps -= 8) {  // 8 * 2 * 15 * 127 fits into 16 bits
    I32 sums[R][2] = {};
    for (int step = 0; step < 8; step++, weight += Weight::STRIDE, x += R * 4) {
      I32 w[2];
      Weight::load(weight, w);
      for (int r = 0; r < R; r++) {
        I32 words = repeat(x + r * 4);
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
      I32 words = repeat(x + r * 4);
      for (int v = 0; v < 2; v++) acc[r][v] = in_place(dot(acc[r][v], w[v], words));
    }
  }
#endif
}

// sums[r][j] += one group of a panel times a tile of R rows.
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
        float* at = sums + r * PANEL + v * 16 + j;
        F32 whole = fma(point, set1(totals[r]), to_float(acc[r][v]));
        store(at, fma(whole, scale * set1(scales[r]), load(at)));
      }
    }
  }
}

void unpack(const uint8_t* nibbles, int64_t inputs, uint8_t* bytes) {
  for (int64_t k = 0; k < inputs; k += 4, nibbles += PANEL * 2, bytes += PANEL * 4) {
    for (int j = 0; j < 16; j += WIDTH) {
      I32 w[2];
      Packed::load(nibbles + j * 4, w);
      store_whole(bytes + j * 4, w[0]);
      store_whole(bytes + 64 + j * 4, w[1]);
    }
  }
}

struct Room {  // of a worker, for one panel
  float* sums;     // [rows][PANEL]
  uint8_t* bytes;  // a block of the panel unpacked
};

// One panel times some tiles of activations.
void panel_product(const LinearArgs& args, const Activations& from, const Tiles& tiles, int64_t first, int64_t panel,
                   int64_t begin, int64_t end, const Room& room) {
  int64_t depth = depth_of(args), groups = depth / args.group, block = groups_in_block(args);
  int64_t row = tiles.begin(begin), rows = tiles.begin(end) - row;
  int64_t group_bytes = PANEL * 3 + args.group * PANEL / 2;
  const uint8_t* weight = (const uint8_t*)args.weight + panel * groups * group_bytes;
  bool often = end - begin > FEW;
  memset(room.sums, 0, rows * PANEL * 4);
  for (int64_t at_group = 0; at_group < groups; at_group += block) {
    int64_t end_group = at_group + block < groups ? at_group + block : groups;
    for (int64_t g = at_group; g < end_group && often; g++) {
      unpack(weight + g * group_bytes + PANEL * 3, args.group, room.bytes + (g - at_group) * args.group * PANEL);
    }
    for (int64_t tile = begin; tile < end; tile++) {
      int64_t at = tiles.begin(tile);
      with_number<MOST>(tiles.size(tile), [&](auto number) {
        constexpr int R = decltype(number)::value;
        for (int64_t g = at_group; g < end_group; g++) {
          const uint8_t *group = weight + g * group_bytes, *x = from.whole + at * depth + g * args.group * R;
          const float *scales = from.scales + at * groups + g * R, *totals = from.sums + at * groups + g * R;
          float* sums = room.sums + (at - row) * PANEL;
          if (often) {
            const uint8_t* bytes = room.bytes + (g - at_group) * args.group * PANEL;
            group_product<R, Unpacked>(group, bytes, x, scales, totals, args.group, sums);
          } else {
            group_product<R, Packed>(group, group + PANEL * 3, x, scales, totals, args.group, sums);
          }
        }
      });
    }
  }
  for (int64_t r = 0; r < rows; r++) put(args, first + row + r, panel, room.sums + r * PANEL);
}

}  // namespace

size_t linear_int4_shared(const LinearArgs& args, int) {
  if (args.wide) return expanded_shared<Nibbles>(args);
  int64_t rows = args.rows < CHUNK ? args.rows : CHUNK;
  return rows <= ALONE ? 0 : activation_bytes(rows, depth_of(args), args.group);
}

void linear_int4(const LinearArgs& args, const Worker& worker) {
  if (args.wide) return expanded_product<Nibbles>(args, worker);
  int64_t depth = depth_of(args), groups = depth / args.group, panels = round_up(args.outs, PANEL) / PANEL;
  bool alone = args.rows <= ALONE;
  for (int64_t first = 0; first < args.rows; first += CHUNK) {
    int64_t rows = args.rows - first < CHUNK ? args.rows - first : CHUNK;
    Tiles tiles(rows, MOST);
    size_t own = alone ? activation_bytes(rows, depth, args.group) : 0, sums = round_up(rows * PANEL * 4, 64);
    char* scratch = (char*)worker.scratch(own + sums + groups_in_block(args) * args.group * PANEL);
    Activations x = activations_at(alone ? scratch : args.shared, rows, depth, args.group);
    Room room = {(float*)(scratch + own), (uint8_t*)scratch + own + sums};

    if (first) worker.barrier();  // nobody reads the chunk before this one any more
    Share mine = share_of(tiles.count * groups, alone ? Worker{0, 1, worker.team} : worker);
    for (int64_t item = mine.begin; item < mine.end; item++) {
      fill(args, x, tiles, first, item / groups, item % groups, (int8_t*)room.bytes);
    }
    if (!alone) worker.barrier();

    int64_t parts = parts_of(panels, tiles, worker);
    mine = share_of(panels * parts, worker);
    for (int64_t item = mine.begin; item < mine.end; item++) {
      int64_t part = item % parts;
      panel_product(args, x, tiles, first, item / parts, tiles.count * part / parts,
                    tiles.count * (part + 1) / parts, room);
    }
  }
}

void pack_int4(const PackArgs& args, const Worker& worker) {
  int64_t groups = padded_ins(Format::int4, args.ins, args.group) / args.group, row_bytes = (args.ins + 1) / 2;
  int64_t group_bytes = PANEL * 3 + args.group * PANEL / 2;
  Share mine = share_of(round_up(args.outs, PANEL) / PANEL, worker);
  for (int64_t panel = mine.begin; panel < mine.end; panel++) {
    uint8_t* to = (uint8_t*)args.packed + panel * groups * group_bytes;
    memset(to, 0, groups * group_bytes);
    for (int64_t j = 0; j < PANEL && panel * PANEL + j < args.outs; j++) {
      int64_t out = panel * PANEL + j;
      const uint8_t* from = (const uint8_t*)args.data + out * row_bytes;
      for (int64_t g = 0; g < groups; g++) {
        uint8_t* group = to + g * group_bytes;
        memcpy(group + j * 2, (const f16*)args.scales + out * groups + g, 2);
        group[PANEL * 2 + j] = args.zeros[out * groups + g];
        int64_t n = args.ins - g * args.group < args.group ? args.ins - g * args.group : args.group;
        for (int64_t i = 0; i < n; i++) {
          int64_t k = g * args.group + i;
          uint8_t nibble = from[k / 2] >> 4 * (k % 2) & 15;
          group[PANEL * 3 + i / 4 * 64 + j % 16 * 4 + i % 4] |= nibble << (j < 16 ? 0 : 4);
        }
      }
    }
  }
}

}  // namespace localllm::LANE
