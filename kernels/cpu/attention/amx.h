// Attention of a block of queries of one kv head with AMX tiles. Scores are stored as keys × queries: the softmax then
// works on vectors of queries, and the weights have the layout of the B tiles of the next product. Layouts:
//
//   queries  [strips][steps of 32 dims][16][32 queries][2 dims]
//   keys     [blocks of 32 keys][steps of 32 dims][2 tiles][16 keys][32 dims]
//   scores   [keys][32 queries]                            for one strip
//   weights  [steps of 32 keys][16][32 queries][2 keys]    for one strip
//   values   [blocks of 32 dims][steps of 32 keys][2 tiles][16 dims][32 keys]
//   sums     [strips][dims][32 queries]
#pragma once

#include "../amx/block.h"
#include "vectors.h"
#include "softmax.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t STRIP = 32;     // queries per strip
constexpr int64_t QUERIES = 128;  // approximate number of queries per block
constexpr int64_t KEYS = 128;     // keys that are processed at a time
constexpr int64_t KEY_STEPS = KEYS / 32;

typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Bits __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves16 __attribute__((vector_size(32)));
typedef uint32_t Words16 __attribute__((vector_size(64)));

struct QueryBlock {
  int64_t row, kv_head;
  int64_t token, tokens;        // index of the first token in the batch; number of tokens
  int64_t position;             // position of the first token in its row
  int64_t first_key, last_key;  // the tokens attend to the keys [first_key, last_key)
};

// Transposes a 16 × 16 matrix of 4-byte words. The strides count words.
static inline void transpose_words(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
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
static inline Bits rounded(F32 x) {  // the upper 16 bits are x rounded to bf16
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

  BlockAttention(const AttentionArgs& args, const QueryBlock& block, int64_t tokens, uint8_t* memory)
      : args(args), block(block), group(args.heads / args.kv_heads), width(round_up(args.dim, 32)), steps(width / 32),
        count(block.tokens * group) {
    int64_t max_strips = strips(tokens, group);
    queries = allocate(memory, max_strips * STRIP * width * 2);
    keys = allocate(memory, KEYS * width * 2);
    values = allocate(memory, KEYS * width * 2);
    staging = (bf16*)allocate(memory, KEYS * width * 2);
    weights = allocate(memory, KEYS * STRIP * 2);
    scores = (float*)allocate(memory, KEYS * STRIP * 4);
    sums = (float*)allocate(memory, max_strips * STRIP * width * 4);
    peak = (float*)allocate(memory, max_strips * STRIP * 4);
    total = (float*)allocate(memory, max_strips * STRIP * 4);
    positions = (int32_t*)allocate(memory, max_strips * STRIP * 4);
  }

  void run() {
    load_queries();
    for (int64_t key = block.first_key; key < block.last_key; key += KEYS) {
      int64_t size = block.last_key - key < KEYS ? block.last_key - key : KEYS;
      load_keys(key, size);
      for (int64_t strip = 0; strip * STRIP < count; strip++) {
        int64_t low = positions[strip * STRIP];
        int64_t high = positions[(strip + 1) * STRIP < count ? (strip + 1) * STRIP - 1 : count - 1];
        bool all_masked = key > high || (args.window && key + size - 1 <= low - args.window);
        if (all_masked) continue;
        bool unmasked = key + round_up(size, 32) - 1 <= low && (!args.window || key > high - args.window);
        softmax_scores(strip, key, size, unmasked);
        add_values(strip, size);
      }
    }
    for (int64_t strip = 0; strip * STRIP < count; strip++) write_output(strip);
  }

 private:
  const AttentionArgs& args;
  const QueryBlock& block;
  const int64_t group, width, steps;
  const int64_t count;  // number of queries: tokens × heads of the group
  uint8_t *queries, *keys, *values, *weights;
  bf16* staging;
  float *scores, *sums, *peak, *total;
  int32_t* positions;
  alignas(64) float factors[STRIP];  // factors that scale the earlier sums of a strip

  static uint8_t* allocate(uint8_t*& memory, int64_t bytes) {
    uint8_t* start = memory;
    memory += round_up(bytes, 64);
    return start;
  }

  // Copies dim elements to row `index` of `staging` and pads the row with zeros. If `from` is null, the row is zero.
  void copy_row(int64_t index, const bf16* from) {
    if (from) memcpy(staging + index * width, from, args.dim * 2);
    int64_t length = from ? args.dim : 0;
    memset(staging + index * width + length, 0, (width - length) * 2);
  }

  void load_queries() {
    for (int64_t strip = 0; strip * STRIP < count; strip++) {
      for (int64_t i = 0; i < STRIP; i++) {
        int64_t index = strip * STRIP + i, query = index < count ? index : count - 1;  // padding repeats the last query
        int64_t token = query / group, head = block.kv_head * group + query % group;
        copy_row(i, (const bf16*)args.query + (block.token + token) * args.query_stride + head * args.dim);
        positions[index] = (int32_t)(block.position + token);
        peak[index] = args.sinks ? args.sinks[head] * LOG2E : LOWEST;
        total[index] = args.sinks ? 1.0f : 0.0f;
      }
      for (int64_t step = 0; step < steps; step++)
        for (int64_t half = 0; half < 2; half++)
          transpose_words((const uint32_t*)(staging + half * 16 * width) + step * 16, width / 2,
               (uint32_t*)(queries + (strip * steps + step) * 2048 + half * 64), 32);
    }
    memset(sums, 0, strips(block.tokens, group) * STRIP * width * 4);
  }

  void copy_rows(const void* pages, int64_t first, int64_t size) {
    const int32_t* table = args.page_table + block.row * args.pages_per_row;
    for (int64_t i = 0; i < round_up(size, 32); i++) {
      int64_t position = first + i;
      if (i >= size) {
        copy_row(i, nullptr);
        continue;
      }
      int64_t slot = (int64_t)table[position / args.page_size] * args.page_size + position % args.page_size;
      copy_row(i, (const bf16*)pages + (slot * args.kv_heads + block.kv_head) * args.dim);
    }
  }

  void load_keys(int64_t first, int64_t size) {
    int64_t blocks = (size + 31) / 32;
    copy_rows(args.key_pages, first, size);
    for (int64_t i = 0; i < blocks * 32; i++)
      for (int64_t step = 0; step < steps; step++)
        memcpy(keys + (i / 32 * steps + step) * 2048 + i % 32 * 64, staging + i * width + step * 32, 64);
    copy_rows(args.value_pages, first, size);
    for (int64_t step = 0; step < blocks; step++)
      for (int64_t tile = 0; tile < width / 16; tile++) {
        alignas(64) uint32_t pairs[16][16];  // [pair of keys][dim]: a word has one dimension of the values of two keys
        for (int64_t i = 0; i < 16; i++) {
          Halves16 even, odd;
          memcpy(&even, staging + (step * 32 + 2 * i) * width + tile * 16, 32);
          memcpy(&odd, staging + (step * 32 + 2 * i + 1) * width + tile * 16, 32);
          Words16 both = __builtin_convertvector(even, Words16) | __builtin_convertvector(odd, Words16) << 16;
          memcpy(pairs[i], &both, 64);
        }
        transpose_words(pairs[0], 16, (uint32_t*)(values + (tile / 2 * KEY_STEPS + step) * 2048 + tile % 2 * 1024), 16);
      }
  }

  void softmax_scores(int64_t strip, int64_t first, int64_t size, bool unmasked) {
    LinePrefetch none{nullptr, 0};
    int64_t rows = round_up(size, 32);
    for (int64_t key = 0; key < rows; key += 32) {
      clear_sums<2>();
      multiply<Product::bf16, 2>(keys + key * steps * 64, queries + strip * steps * 2048, 64, steps, none);
      store_sums<2>(scores + key * STRIP);
    }
    Scores scaled{args.scale, args.soft_cap};
    for (int64_t j = 0; j < STRIP; j += WIDTH) {
      float* strip_peak = peak + strip * STRIP + j;
      float* strip_total = total + strip * STRIP + j;
      F32 before = load(strip_peak), high = before;
      Ints position;
      memcpy(&position, positions + strip * STRIP + j, sizeof position);
      for (int64_t key = 0; key < rows; key++) {
        F32 value = scaled(load(scores + key * STRIP + j));
        if (!unmasked) value = masked(value, (int32_t)(first + key), position);
        store(scores + key * STRIP + j, value);
        high = max(high, value);
      }
      F32 factor = exp2(before - high);
      F32 sum = load(strip_total) * factor;
      for (int64_t key = 0; key < rows; key += 2) {
        F32 even = exp2(load(scores + key * STRIP + j) - high);
        F32 odd = exp2(load(scores + (key + 1) * STRIP + j) - high);
        sum = sum + even + odd;
        Bits pair = rounded(even) >> 16 | (rounded(odd) & 0xffff0000u);
        memcpy(weights + key * STRIP * 2 + j * 4, &pair, sizeof pair);
      }
      store(factors + j, factor);
      store(strip_peak, high);
      store(strip_total, sum);
    }
  }

  F32 masked(F32 value, int32_t key, Ints position) const {
    Ints visible = position >= key;
    if (args.window) visible &= position < (int32_t)(key + args.window);
    Bits selected = (Bits)visible;
    Bits bits = (selected & bits_of(value)) | (~selected & bits_of(set1(LOWEST)));
    F32 out;
    memcpy(&out.v, &bits, sizeof bits);
    return out;
  }

  void add_values(int64_t strip, int64_t size) {
    LinePrefetch none{nullptr, 0};
    float* strip_sums = sums + strip * STRIP * width;
    bool changed = false;
    for (int64_t j = 0; j < STRIP; j++) changed |= factors[j] != 1.0f;
    for (int64_t dim = 0; changed && dim < width; dim++)
      for (int64_t j = 0; j < STRIP; j += WIDTH)
        store(strip_sums + dim * STRIP + j, load(strip_sums + dim * STRIP + j) * load(factors + j));
    for (int64_t dims = 0; dims < width / 32; dims++) {
      load_sums<2>(strip_sums + dims * SUMS);
      multiply<Product::bf16, 2>(values + dims * KEY_STEPS * 2048, weights, 64, (size + 31) / 32, none);
      store_sums<2>(strip_sums + dims * SUMS);
    }
  }

  void write_output(int64_t strip) {
    float* strip_sums = sums + strip * STRIP * width;
    for (int64_t j = 0; j < STRIP; j += WIDTH) {
      F32 share = set1(1.0f) / load(total + strip * STRIP + j);
      for (int64_t dim = 0; dim < width; dim++)
        store(strip_sums + dim * STRIP + j, load(strip_sums + dim * STRIP + j) * share);
    }
    for (int64_t dim = 0; dim < args.dim; dim += 16)
      for (int64_t half = 0; half < STRIP; half += 16) {
        alignas(64) float rows[16][16];
        transpose_words((const uint32_t*)(strip_sums + dim * STRIP + half), STRIP, (uint32_t*)rows[0], 16);
        for (int64_t i = 0; i < 16; i++) {
          int64_t query = strip * STRIP + half + i, left = args.dim - dim;
          if (query >= count) break;
          int64_t token = block.token + query / group, head = block.kv_head * group + query % group;
          bf16* out = (bf16*)args.out + (token * args.heads + head) * args.dim + dim;
          each_vector(0, left < 16 ? left : 16, [&](int64_t k, auto n) { store(out + k, load(rows[i] + k), n); });
        }
      }
  }
};

}  // namespace
}  // namespace localllm::VARIANT
