// A block of queries of one key-value head against all keys that they see, by tiles: scores are keys × queries, so that
// the softmax runs across vectors of queries, and the weights come out as the products over values want them.
//
//   queries  [strips][steps of 32 dims][16][32 queries][2 dims]
//   keys     [blocks of 32 keys][steps of 32 dims][2 tiles][16 keys][32 dims]
//   scores   [keys][32 queries]                            of one strip
//   weights  [steps of 32 keys][16][32 queries][2 keys]    of one strip
//   values   [blocks of 32 dims][steps of 32 keys][2 tiles][16 dims][32 keys]
//   sums     [strips][dims][32 queries]
#pragma once

#include "amx_block.h"
#include "lanes.h"
#include "softmax.h"

namespace localllm::LANE {
namespace {

constexpr int64_t STRIP = 32;     // queries
constexpr int64_t QUERIES = 128;  // of a block, about
constexpr int64_t KEYS = 128;     // at a time
constexpr int64_t KEY_STEPS = KEYS / 32;

typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Bits __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves16 __attribute__((vector_size(32)));
typedef uint32_t Words16 __attribute__((vector_size(64)));

struct QueryBlock {
  int64_t row, kv_head;
  int64_t token, tokens;    // the first in the batch, how many
  int64_t position;         // of the first in its row
  int64_t first_key, last_key;  // what some query sees: [first_key, last_key)
};

// to [16][16] = from [16][16] turned about its diagonal; strides in words.
static inline void turn(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  for (int i = 0; i < 16; i += WIDTH)
    for (int j = 0; j < 16; j += WIDTH) {
      F32 x[WIDTH];
      for (int row = 0; row < WIDTH; row++) x[row] = load((const float*)(from + (i + row) * from_stride + j));
      transpose(x);
      for (int row = 0; row < WIDTH; row++) store((float*)(to + (j + row) * to_stride + i), x[row]);
    }
}

static inline Bits bits_of(F32 x) {
  Bits bits;
  memcpy(&bits, &x.v, sizeof bits);
  return bits;
}
static inline Bits rounded(F32 x) {  // bf16, in the upper half
  Bits bits = bits_of(x);
  return bits + 0x7fff + (bits >> 16 & 1);
}

class BlockAttention {
 public:
  static int64_t strips(int64_t tokens, int64_t group) { return (tokens * group + STRIP - 1) / STRIP; }
  static int64_t scratch(int64_t tokens, int64_t group, int64_t dim) {
    int64_t width = round_up(dim, 32), count = strips(tokens, group);
    return KEYS * width * 6 + count * STRIP * width * 6 + KEYS * STRIP * 6 + count * STRIP * 12 + 64 * 8;
  }

  BlockAttention(const AttentionArgs& args, const QueryBlock& own, int64_t tokens, uint8_t* memory)
      : args(args), own(own), group(args.heads / args.kv_heads), width(round_up(args.dim, 32)), steps(width / 32),
        count(own.tokens * group) {
    int64_t most_strips = strips(tokens, group);
    queries = take(memory, most_strips * STRIP * width * 2);
    keys = take(memory, KEYS * width * 2);
    values = take(memory, KEYS * width * 2);
    room = (bf16*)take(memory, KEYS * width * 2);
    weights = take(memory, KEYS * STRIP * 2);
    scores = (float*)take(memory, KEYS * STRIP * 4);
    sums = (float*)take(memory, most_strips * STRIP * width * 4);
    most = (float*)take(memory, most_strips * STRIP * 4);
    total = (float*)take(memory, most_strips * STRIP * 4);
    positions = (int32_t*)take(memory, most_strips * STRIP * 4);
  }

  void run() {
    take_queries();
    for (int64_t key = own.first_key; key < own.last_key; key += KEYS) {
      int64_t size = own.last_key - key < KEYS ? own.last_key - key : KEYS;
      take_keys(key, size);
      for (int64_t strip = 0; strip * STRIP < count; strip++) {
        int64_t low = positions[strip * STRIP];
        int64_t high = positions[(strip + 1) * STRIP < count ? (strip + 1) * STRIP - 1 : count - 1];
        if (key > high || (args.window && key + size - 1 <= low - args.window)) continue;  // nothing seen
        bool all = key + round_up(size, 32) - 1 <= low && (!args.window || key > high - args.window);
        score(strip, key, size, all);
        add_values(strip, size);
      }
    }
    for (int64_t strip = 0; strip * STRIP < count; strip++) answer(strip);
  }

 private:
  const AttentionArgs& args;
  const QueryBlock& own;
  const int64_t group, width, steps, count;  // queries: tokens × heads of the group
  uint8_t *queries, *keys, *values, *weights;
  bf16* room;
  float *scores, *sums, *most, *total;
  int32_t* positions;
  alignas(64) float shrink[STRIP];

  static uint8_t* take(uint8_t*& memory, int64_t bytes) {
    uint8_t* taken = memory;
    memory += round_up(bytes, 64);
    return taken;
  }

  // Row `index` of room = dim elements, filled up with zeros; of nothing: zeros.
  void copy(int64_t index, const bf16* from) {
    if (from) memcpy(room + index * width, from, args.dim * 2);
    int64_t kept = from ? args.dim : 0;
    memset(room + index * width + kept, 0, (width - kept) * 2);
  }

  void take_queries() {
    for (int64_t strip = 0; strip * STRIP < count; strip++) {
      for (int64_t i = 0; i < STRIP; i++) {
        int64_t at = strip * STRIP + i, query = at < count ? at : count - 1;  // those too many repeat the last
        int64_t token = query / group, head = own.kv_head * group + query % group;
        copy(i, (const bf16*)args.query + (own.token + token) * args.query_stride + head * args.dim);
        positions[at] = (int32_t)(own.position + token);
        most[at] = args.sinks ? args.sinks[head] * LOG2E : LOWEST;
        total[at] = args.sinks ? 1.0f : 0.0f;
      }
      for (int64_t step = 0; step < steps; step++)
        for (int64_t half = 0; half < 2; half++)
          turn((const uint32_t*)(room + half * 16 * width) + step * 16, width / 2,
               (uint32_t*)(queries + (strip * steps + step) * 2048 + half * 64), 32);
    }
    memset(sums, 0, strips(own.tokens, group) * STRIP * width * 4);
  }

  void fill_room(const void* pages, int64_t first, int64_t size) {
    const int32_t* table = args.page_table + own.row * args.pages_per_row;
    for (int64_t i = 0; i < round_up(size, 32); i++) {
      int64_t at = first + i;
      if (i >= size) {
        copy(i, nullptr);
        continue;
      }
      int64_t slot = (int64_t)table[at / args.page_size] * args.page_size + at % args.page_size;
      copy(i, (const bf16*)pages + (slot * args.kv_heads + own.kv_head) * args.dim);
    }
  }

  void take_keys(int64_t first, int64_t size) {
    int64_t blocks = (size + 31) / 32;
    fill_room(args.key_pages, first, size);
    for (int64_t i = 0; i < blocks * 32; i++)
      for (int64_t step = 0; step < steps; step++)
        memcpy(keys + (i / 32 * steps + step) * 2048 + i % 32 * 64, room + i * width + step * 32, 64);
    fill_room(args.value_pages, first, size);
    for (int64_t step = 0; step < blocks; step++)
      for (int64_t tile = 0; tile < width / 16; tile++) {
        alignas(64) uint32_t pairs[16][16];  // two keys of a dimension in a word
        for (int64_t i = 0; i < 16; i++) {
          Halves16 even, odd;
          memcpy(&even, room + (step * 32 + 2 * i) * width + tile * 16, 32);
          memcpy(&odd, room + (step * 32 + 2 * i + 1) * width + tile * 16, 32);
          Words16 both = __builtin_convertvector(even, Words16) | __builtin_convertvector(odd, Words16) << 16;
          memcpy(pairs[i], &both, 64);
        }
        turn(pairs[0], 16, (uint32_t*)(values + (tile / 2 * KEY_STEPS + step) * 2048 + tile % 2 * 1024), 16);
      }
  }

  void score(int64_t strip, int64_t first, int64_t size, bool all) {
    Ahead none{nullptr, 0};
    int64_t rows = round_up(size, 32);
    for (int64_t key = 0; key < rows; key += 32) {
      clear_sums<2>();
      multiply<Product::bf16, 2>(keys + key * steps * 64, queries + strip * steps * 2048, 64, steps, none);
      store_sums<2>(scores + key * STRIP);
    }
    Scores scaled{args.scale, args.soft_cap};
    for (int64_t j = 0; j < STRIP; j += WIDTH) {
      float *strip_most = most + strip * STRIP + j, *strip_total = total + strip * STRIP + j;
      F32 before = load(strip_most), high = before;
      Ints position;
      memcpy(&position, positions + strip * STRIP + j, sizeof position);
      for (int64_t key = 0; key < rows; key++) {
        F32 value = scaled(load(scores + key * STRIP + j));
        if (!all) value = masked(value, (int32_t)(first + key), position);
        store(scores + key * STRIP + j, value);
        high = max(high, value);
      }
      F32 less = exp2(before - high), sum = load(strip_total) * less;
      for (int64_t key = 0; key < rows; key += 2) {
        F32 even = exp2(load(scores + key * STRIP + j) - high);
        F32 odd = exp2(load(scores + (key + 1) * STRIP + j) - high);
        sum = sum + even + odd;
        Bits pair = rounded(even) >> 16 | (rounded(odd) & 0xffff0000u);
        memcpy(weights + key * STRIP * 2 + j * 4, &pair, sizeof pair);
      }
      store(shrink + j, less);
      store(strip_most, high);
      store(strip_total, sum);
    }
  }

  F32 masked(F32 value, int32_t key, Ints position) const {
    Ints seen = position >= key;
    if (args.window) seen &= position < (int32_t)(key + args.window);
    Bits kept = (Bits)seen;
    Bits chosen = (kept & bits_of(value)) | (~kept & bits_of(set1(LOWEST)));
    F32 out;
    memcpy(&out.v, &chosen, sizeof chosen);
    return out;
  }

  void add_values(int64_t strip, int64_t size) {
    Ahead none{nullptr, 0};
    float* own_sums = sums + strip * STRIP * width;
    bool changed = false;
    for (int64_t j = 0; j < STRIP; j++) changed |= shrink[j] != 1.0f;
    for (int64_t dim = 0; changed && dim < width; dim++)
      for (int64_t j = 0; j < STRIP; j += WIDTH)
        store(own_sums + dim * STRIP + j, load(own_sums + dim * STRIP + j) * load(shrink + j));
    for (int64_t block = 0; block < width / 32; block++) {
      load_sums<2>(own_sums + block * SUMS);
      multiply<Product::bf16, 2>(values + block * KEY_STEPS * 2048, weights, 64, (size + 31) / 32, none);
      store_sums<2>(own_sums + block * SUMS);
    }
  }

  void answer(int64_t strip) {
    float* own_sums = sums + strip * STRIP * width;
    for (int64_t j = 0; j < STRIP; j += WIDTH) {
      F32 share = set1(1.0f) / load(total + strip * STRIP + j);
      for (int64_t dim = 0; dim < width; dim++)
        store(own_sums + dim * STRIP + j, load(own_sums + dim * STRIP + j) * share);
    }
    for (int64_t dim = 0; dim < args.dim; dim += 16)
      for (int64_t half = 0; half < STRIP; half += 16) {
        alignas(64) float rows[16][16];
        turn((const uint32_t*)(own_sums + dim * STRIP + half), STRIP, (uint32_t*)rows[0], 16);
        for (int64_t i = 0; i < 16; i++) {
          int64_t query = strip * STRIP + half + i, left = args.dim - dim;
          if (query >= count) break;
          int64_t token = own.token + query / group, head = own.kv_head * group + query % group;
          bf16* out = (bf16*)args.out + (token * args.heads + head) * args.dim + dim;
          each_vector(0, left < 16 ? left : 16, [&](int64_t k, auto n) { store(out + k, load(rows[i] + k), n); });
        }
      }
  }
};

}  // namespace
}  // namespace localllm::LANE
