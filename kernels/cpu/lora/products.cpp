// LoRA products: each token adds the low-rank product of its own adapter to a projection.
//
// 1. lora_shrink and lora_look_up compute the inner products, scale * A x, in the order of the tiles.
// 2. lora_expand adds B times the inner products to the outputs. All workers need the inner products of step 1, so a
//    barrier separates the steps.
//
// A worker reads the factors of a tile from memory once, and multiplies them with all tokens of the tile.

#include "../vectors/convert.h"
#include "../products/tile.h"
#include "../vectors/transpose.h"

namespace localllm::VARIANT {
namespace {

constexpr int ROWS = WIDTH == 16 ? 4 : 2;  // rows of A that one pass over the inputs multiplies
constexpr int MAX_TOKENS = 4;              // tokens of one pass
constexpr int64_t CHUNK = 2 * WIDTH;       // inputs that one step of a pass multiplies
constexpr int64_t LEAD = 8;                // distance of the prefetch of B, in blocks of WIDTH outputs
constexpr int QUAD = 4;                    // 4-byte lanes in 16 bytes

// Loads the CHUNK elements at p into two vectors. The order of the elements depends only on their type.
static inline void load_chunk(const float* p, F32 (&to)[2]) {
  to[0] = load(p);
  to[1] = load(p + WIDTH);
}
template <class T>
static inline void load_chunk(const T* p, F32 (&to)[2]) {
  to[0] = every_other(p, 0);
  to[1] = every_other(p, 1);
}

// Loads the first `count` elements at p, in the same order; the rest of the CHUNK elements is zero.
template <class T>
static inline void load_chunk(const T* p, int64_t count, F32 (&to)[2]) {
  T values[CHUNK];
  if (count >= CHUNK) return load_chunk(p, to);
  memset(values, 0, sizeof values);
  memcpy(values, p, count * sizeof(T));
  load_chunk(values, to);
}

// products[row][token] = dot product of a row of A and the input of a token.
template <class T, int TOKENS>
static inline void multiply_rows(const T* const* a, const T* const* x, int64_t in_features, int64_t lead,
                                 float (*products)[MAX_TOKENS]) {
  F32 sums[ROWS][TOKENS];
  for (int row = 0; row < ROWS; row++)
    for (int token = 0; token < TOKENS; token++) sums[row][token] = zero();
  for (int64_t k = 0; k < in_features; k += CHUNK) {
    F32 factors[ROWS][2], values[2];
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++) {
      load_chunk(a[row] + k, in_features - k, factors[row]);
      for (size_t line = 0; line < CHUNK * sizeof(T); line += 64)
        __builtin_prefetch((const char*)(a[row] + k + lead) + line);
    }
#pragma GCC unroll 4
    for (int token = 0; token < TOKENS; token++) {
      load_chunk(x[token] + k, in_features - k, values);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; row++) {
        sums[row][token] = multiply_add(sums[row][token], factors[row][0], values[0]);
        sums[row][token] = multiply_add(sums[row][token], factors[row][1], values[1]);
      }
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int token = 0; token < TOKENS; token++) products[row][token] = sum(sums[row][token]);
}

template <class T, int TOKENS = 1>
static inline void multiply_tokens(int tokens, const T* const* a, const T* const* x, int64_t in_features, int64_t lead,
                                   float (*products)[MAX_TOKENS]) {
  if constexpr (TOKENS < MAX_TOKENS) {
    if (tokens > TOKENS) return multiply_tokens<T, TOKENS + 1>(tokens, a, x, in_features, lead, products);
  }
  multiply_rows<T, TOKENS>(a, x, in_features, lead, products);
}

// The inner products of ROWS rows of A, from `first` on, with the tokens of a tile.
template <class T>
static inline void shrink_rows(const LoraArgs& args, int64_t tile, int64_t first) {
  int64_t width = args.slices * args.rank, rows = width - first < ROWS ? width - first : ROWS;
  const T* factors = (const T*)args.a + args.tile_slots[tile] * args.a_stride + first * args.in_features;
  const T* a[ROWS];
  for (int row = 0; row < ROWS; row++) a[row] = factors + (row < rows ? row : rows - 1) * args.in_features;
  int64_t end = args.starts[tile + 1];
  for (int64_t index = args.starts[tile]; index < end; index += MAX_TOKENS) {
    int tokens = end - index < MAX_TOKENS ? (int)(end - index) : MAX_TOKENS;
    const T* x[MAX_TOKENS];
    float products[ROWS][MAX_TOKENS];
    for (int token = 0; token < tokens; token++) x[token] = (const T*)args.x + args.order[index + token] * args.x_stride;
    multiply_tokens<T>(tokens, a, x, args.in_features, ROWS * args.in_features, products);
    for (int token = 0; token < tokens; token++)
      for (int64_t row = 0; row < rows; row++)
        args.inner[(index + token) * width + first + row] =
            products[row][token] * args.scales[args.order[index + token]];
  }
}

template <class T>
static inline void shrink(const LoraArgs& args, const Worker& worker) {
  int64_t groups = (args.slices * args.rank + ROWS - 1) / ROWS;
  Share share = share_of(args.tiles * groups, worker);
  for (long item = share.begin; item < share.end; item++) shrink_rows<T>(args, item / groups, item % groups * ROWS);
}

template <class T>
static inline void look_up(const LoraArgs& args, const Worker& worker) {
  Share share = share_of(args.tiles, worker);
  for (long tile = share.begin; tile < share.end; tile++) {
    const T* a = (const T*)args.a + args.tile_slots[tile] * args.a_stride;
    for (int64_t index = args.starts[tile]; index < args.starts[tile + 1]; index++) {
      int32_t token = args.order[index];
      for (int64_t row = 0; row < args.rank; row++)
        args.inner[index * args.rank + row] =
            to_float(a[row * args.in_features + args.ids[token]]) * args.scales[token];
    }
  }
}

// A block of B, transposed: the factors of WIDTH outputs for each rank. The factors of two ranks alternate if the
// elements have two bytes, as in Pairs of products/tile.h.
template <class T>
constexpr int LANE = 4 / sizeof(T);  // elements of a 4-byte lane

template <class T>
static inline void transpose_factors(const T* b, int64_t rank, T* out) {
#if defined(__AVX2__)
  if (rank % (QUAD * LANE<T>) == 0) {
    for (int64_t first = 0; first < rank; first += QUAD * LANE<T>) {
      F32 rows[QUAD], columns[QUAD];
      for (int i = 0; i < QUAD; i++) rows[i] = every_fourth_row((const float*)(b + i * rank + first), rank / LANE<T>);
      transpose_quads(rows, columns);
      for (int i = 0; i < QUAD; i++) store((float*)(out + (first + i * LANE<T>) * WIDTH), columns[i]);
    }
    return;
  }
#endif
  for (int64_t row = 0; row < rank; row++)
    for (int i = 0; i < WIDTH; i++)
      out[(row / LANE<T> * WIDTH + i) * LANE<T> + row % LANE<T>] = b[i * rank + row];
}

static inline F32 factors_of(const float* lanes, int) { return load(lanes); }
template <class T>
static inline F32 factors_of(const T* lanes, int element) { return every_other(lanes, element); }

// Multiplies a block of B with the result of A of each token: sums[token] = block × (scale * A x).
template <class T, int TOKENS>
static inline void multiply_block(const T* block, const float* inner, int64_t width, int64_t rank, F32* results) {
  F32 sums[TOKENS];
  for (int token = 0; token < TOKENS; token++) sums[token] = zero();
  auto add = [&](int64_t row, int element) {
    F32 factors = factors_of(block + row * WIDTH, element);
#pragma GCC unroll 4
    for (int token = 0; token < TOKENS; token++)
      sums[token] = multiply_add(sums[token], set1(inner[token * width + row + element]), factors);
  };
  int64_t row = 0;
  for (; row + LANE<T> <= rank; row += LANE<T>) {
#pragma GCC unroll 2
    for (int element = 0; element < LANE<T>; element++) add(row, element);
  }
  if (row < rank) add(row, 0);
  for (int token = 0; token < TOKENS; token++) results[token] = sums[token];
}

template <class T, int TOKENS = 1>
static inline void multiply_block_tokens(int tokens, const T* block, const float* inner, int64_t width, int64_t rank,
                                         F32* results) {
  if constexpr (TOKENS < MAX_TOKENS) {
    if (tokens > TOKENS) return multiply_block_tokens<T, TOKENS + 1>(tokens, block, inner, width, rank, results);
  }
  multiply_block<T, TOKENS>(block, inner, width, rank, results);
}

static inline void add_to(Type type, void* out, int64_t offset, F32 delta, int count) {
  as_stored(type, out, [=](auto* row) {
    if (count == WIDTH) return store(row + offset, load(row + offset) + delta);
    store(row + offset, load(row + offset, count) + delta, count);
  });
}

// Adds the products of `count` outputs, from `first` on, to the outputs of the tokens of a tile.
template <class T>
static inline void expand_block(const LoraArgs& args, int64_t tile, int slice, int64_t first, int count, T* block) {
  int64_t width = args.slices * args.rank, end = args.starts[tile + 1];
  const T* b = (const T*)args.b + args.tile_slots[tile] * args.b_stride + first * args.rank;
  if (count < WIDTH) {  // transpose_factors reads WIDTH outputs, so zeros are appended
    T* padded = block + round_up(args.rank, 2) * WIDTH;
    memset(padded, 0, args.rank * WIDTH * sizeof(T));
    memcpy(padded, b, args.rank * count * sizeof(T));
    b = padded;
  }
  transpose_factors(b, args.rank, block);
  for (int64_t index = args.starts[tile]; index < end; index += MAX_TOKENS) {
    int tokens = end - index < MAX_TOKENS ? (int)(end - index) : MAX_TOKENS;
    F32 deltas[MAX_TOKENS];
    multiply_block_tokens<T>(tokens, block, args.inner + index * width + slice * args.rank, width, args.rank, deltas);
    for (int token = 0; token < tokens; token++)
      add_to(args.out_type, args.out, args.order[index + token] * args.out_stride + first, deltas[token], count);
  }
}

// True if the adapter of the tile changes the slice: an adapter without factors for the module has zeros.
static inline bool has_products(const LoraArgs& args, int64_t tile, int slice) {
  int64_t width = args.slices * args.rank;
  for (int64_t index = args.starts[tile]; index < args.starts[tile + 1]; index++)
    for (int64_t row = 0; row < args.rank; row++)
      if (args.inner[index * width + slice * args.rank + row] != 0) return true;
  return false;
}

static inline int64_t blocks_of(const LoraArgs& args, int slice) { return (args.widths[slice] + WIDTH - 1) / WIDTH; }

// Prefetches the factors of a block, or of a block of the next tile if the share of the worker ends before it.
template <class T>
static inline void prefetch_factors(const LoraArgs& args, Share share, int64_t tile, int64_t item) {
  if (item >= share.end) {
    item += share.begin - share.end;
    tile = tile + 1 < args.tiles ? tile + 1 : tile;
  }
  int64_t bytes = WIDTH * args.rank * sizeof(T);
  const char* factors = (const char*)((const T*)args.b + args.tile_slots[tile] * args.b_stride) + item * bytes;
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(factors + line);
}

// Adds the products of one slice and one tile, for the blocks of the worker's share. The slice starts at the output
// `first` and at the block `first_block`.
template <class T>
static inline void expand_slice(const LoraArgs& args, Share share, int64_t tile, int slice, int64_t first,
                                int64_t first_block, T* block) {
  if (!has_products(args, tile, slice)) return;
  int64_t end = first_block + blocks_of(args, slice);
  int64_t begin = share.begin > first_block ? share.begin : first_block;
  for (int64_t item = begin; item < (share.end < end ? share.end : end); item++) {
    int64_t offset = (item - first_block) * WIDTH, left = args.widths[slice] - offset;
    prefetch_factors<T>(args, share, tile, item + LEAD);
    expand_block(args, tile, slice, first + offset, left < WIDTH ? (int)left : WIDTH, block);
  }
}

template <class T>
static inline void expand(const LoraArgs& args, const Worker& worker) {
  T* block = (T*)worker.scratch((2 * args.rank + 1) * WIDTH * sizeof(T));
  int64_t blocks = 0;
  for (int slice = 0; slice < args.slices; slice++) blocks += blocks_of(args, slice);
  Share share = share_of(blocks, worker);  // about the outputs that the worker has written in the product
  for (int64_t tile = 0; tile < args.tiles; tile++) {
    int64_t first = 0, first_block = 0;
    for (int slice = 0; slice < args.slices; slice++) {
      expand_slice(args, share, tile, slice, first, first_block, block);
      first += args.widths[slice];
      first_block += blocks_of(args, slice);
    }
  }
}

}  // namespace

void lora_shrink(const LoraArgs& args, const Worker& worker) {
  switch (args.type) {
    case Type::f32: return shrink<float>(args, worker);
    case Type::bf16: return shrink<bf16>(args, worker);
    case Type::f16: return shrink<f16>(args, worker);
  }
}

void lora_look_up(const LoraArgs& args, const Worker& worker) {
  switch (args.type) {
    case Type::f32: return look_up<float>(args, worker);
    case Type::bf16: return look_up<bf16>(args, worker);
    case Type::f16: return look_up<f16>(args, worker);
  }
}

void lora_expand(const LoraArgs& args, const Worker& worker) {
  switch (args.type) {
    case Type::f32: return expand<float>(args, worker);
    case Type::bf16: return expand<bf16>(args, worker);
    case Type::f16: return expand<f16>(args, worker);
  }
}

}  // namespace localllm::VARIANT
