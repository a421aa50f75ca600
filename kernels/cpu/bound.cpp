#include "bound.h"

#include "vectors/vec.h"
#if defined(__AMX_BF16__)
#include "amx/tiles.h"
#endif

namespace localllm::VARIANT {

namespace {

constexpr int CHAINS = 12;  // independent sums: enough to hide the latency of an addition, and all fit in registers

// Makes the compiler assume that the value is used and changed here, so that it does not remove the loop.
template <class T>
static inline void touch(T& value) {
  asm volatile("" : "+m"(value));
}

typedef uint64_t Line __attribute__((vector_size(64)));

// Each worker reads four streams with prefetches, which is never slower than one stream.
double read(const BoundArgs& args, const Worker& worker) {
  constexpr int STREAMS = 4, LINES = 2, DISTANCE = 1024;
  Share share = share_of(args.bytes / (long)(STREAMS * LINES * sizeof(Line)), worker);
  long lines = (share.end - share.begin) * LINES;  // cache lines per stream
  const Line* data = (const Line*)args.data + share.begin * LINES * STREAMS;
  Line sums[STREAMS][LINES] = {};
  for (int64_t repeat = 0; repeat < args.repeats; repeat++)
    for (long first = 0; first < lines; first += LINES)
      for (int stream = 0; stream < STREAMS; stream++)
        for (int i = 0; i < LINES; i++) {
          const Line* line = data + stream * lines + first + i;
          __builtin_prefetch((const char*)line + DISTANCE);
          sums[stream][i] |= *line;
        }
  for (int stream = 0; stream < STREAMS; stream++)
    for (int i = 0; i < LINES; i++) touch(sums[stream][i]);
  return (double)lines * STREAMS * sizeof(Line) * args.repeats;
}

double f32(int64_t repeats) {
  F32 sums[CHAINS], x = set1(0.5f);
  touch(x);
  for (int i = 0; i < CHAINS; i++) sums[i] = set1((float)i);
  for (int64_t repeat = 0; repeat < repeats; repeat++)
    for (int i = 0; i < CHAINS; i++) sums[i] = fma(sums[i], x, x);
  for (int i = 0; i < CHAINS; i++) touch(sums[i]);
  return 2.0 * CHAINS * WIDTH * repeats;
}

double bf16_pairs(int64_t repeats) {
#if defined(__AVX512BF16__)
  __m512 sums[CHAINS];
  __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f00);
  for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_setzero_ps();
  for (int64_t repeat = 0; repeat < repeats; repeat++)
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], x, x);
  for (int i = 0; i < CHAINS; i++) touch(sums[i]);
  return 2.0 * CHAINS * 32 * repeats;
#else
  return 0 * repeats;
#endif
}

#if defined(__AVX512VNNI__)
typedef __m512i Bytes;
static inline Bytes dot(Bytes sum, Bytes x) { return _mm512_dpbusd_epi32(sum, x, x); }
#elif defined(__AVXVNNI__)
typedef __m256i Bytes;
static inline Bytes dot(Bytes sum, Bytes x) { return _mm256_dpbusd_avx_epi32(sum, x, x); }
#elif defined(__AVX2__)
typedef __m256i Bytes;
static inline Bytes dot(Bytes sum, Bytes x) {
  asm volatile("" : "+x"(x));  // hides that x is constant, so that the compiler repeats the product
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, x), _mm256_set1_epi16(1)));
}
#endif

double int8_fours(int64_t repeats) {
#if defined(__AVX2__)
  Bytes sums[CHAINS] = {}, x = {};
  touch(x);
  for (int64_t repeat = 0; repeat < repeats; repeat++)
    for (int i = 0; i < CHAINS; i++) sums[i] = dot(sums[i], x);
  for (int i = 0; i < CHAINS; i++) touch(sums[i]);
  return 2.0 * CHAINS * sizeof(Bytes) * repeats;
#else
  return 0 * repeats;
#endif
}

#if defined(__AMX_BF16__)
// Products of 2 × 2 tiles of random numbers, in the blocking of the kernels. Zeros would need less power and run faster
// than real data.
template <Product product>
double tiles(int64_t repeats) {
  alignas(64) uint16_t numbers[4][TILE_ROWS * TILE_BYTES / 2];  // magnitudes in [1, 2) as bf16; random bytes as int8
  uint32_t state = 1;
  for (auto& tile : numbers)
    for (uint16_t& number : tile) {
      state = state * 1664525 + 1013904223;
      number = (uint16_t)(0x3f80 | (state >> 25) | (state >> 16 & 0x8000));
    }
  configure_tiles(TILE_BYTES);
  tile_load_keep<4>(numbers[0], TILE_BYTES);
  tile_load_keep<5>(numbers[1], TILE_BYTES);
  tile_load_keep<6>(numbers[2], TILE_BYTES);
  tile_load_keep<7>(numbers[3], TILE_BYTES);
  for (int64_t repeat = 0; repeat < repeats; repeat++) {
    if (repeat % 64 == 0) {  // keeps the sums finite
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
    }
    tile_multiply<product, 0, 4, 6>();
    tile_multiply<product, 1, 4, 7>();
    tile_multiply<product, 2, 5, 6>();
    tile_multiply<product, 3, 5, 7>();
  }
  tile_release();
  return 4.0 * 2 * TILE_ROWS * TILE_ROWS * (product == Product::bf16 ? TILE_BYTES / 2 : TILE_BYTES) * repeats;
}
double tiles(Bound kind, int64_t repeats) {
  return kind == Bound::tile_bf16 ? tiles<Product::bf16>(repeats) : tiles<Product::int8>(repeats);
}
#else
double tiles(Bound, int64_t) { return 0; }
#endif

}  // namespace

void bound(const BoundArgs& args, const Worker& worker) {
  double count = 0;
  switch (args.kind) {
    case Bound::read: count = read(args, worker); break;
    case Bound::f32: count = f32(args.repeats); break;
    case Bound::bf16: count = bf16_pairs(args.repeats); break;
    case Bound::int8: count = int8_fours(args.repeats); break;
    case Bound::tile_bf16:
    case Bound::tile_int8: count = tiles(args.kind, args.repeats); break;
  }
  args.counts[worker.index] = count;
}

}  // namespace localllm::VARIANT
