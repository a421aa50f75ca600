// Products with 8-bit float weights (e4m3), activations as they are.

#include "expand.h"
#include "linear.h"

namespace localllm::LANE {
namespace {

struct E4m3 {
  static constexpr Format format = Format::fp8;

  // An e4m3 number has the bits of a half but for the exponent, which counts from 7 and not from 15: shifted into
  // place it is 2^8 too small, subnormals included. (As a float: 2^120.) A NaN becomes a number; loading refuses them.
  static void expand(const uint8_t* block, int64_t, int64_t begin, int64_t end, float* out) {
    for (int j = 0; j < PANEL; j += WIDTH) {
      const uint8_t* bytes = block + PANEL * 4 + begin * PANEL + j * 2;
#if defined(__F16C__)
      F32 scale = load((const float*)block + j) * set1(0x1p8f);
#else
      F32 scale = load((const float*)block + j), rescale = set1(0x1p120f);
#endif
      for (int64_t k = begin; k < end; k += 2, bytes += PANEL * 2, out += 2 * PANEL) {
#if defined(__AVX512F__)
        __m256i pairs = _mm256_loadu_si256((const __m256i*)bytes);
        F32 even = {_mm512_cvtph_ps(halves(_mm256_slli_epi16(pairs, 8)))}, odd = {_mm512_cvtph_ps(halves(pairs))};
        store(out + j, even * scale);
        store(out + PANEL + j, odd * scale);
#elif defined(__AVX2__)
        __m128i pairs = _mm_loadu_si128((const __m128i*)bytes);
        F32 even = {_mm256_cvtph_ps(halves(_mm_slli_epi16(pairs, 8)))}, odd = {_mm256_cvtph_ps(halves(pairs))};
        store(out + j, even * scale);
        store(out + PANEL + j, odd * scale);
#else
        for (int odd = 0; odd < 2; odd++) {
          I32 byte;
          for (int i = 0; i < WIDTH; i++) byte.v[i] = bytes[2 * i + odd];
          I32 bits = (byte & all(0x7f)) << 20 | (byte & all(0x80)) << 24;
          store(out + odd * PANEL + j, as_float(bits) * rescale * scale);
        }
#endif
      }
      out -= (end - begin) * PANEL;
    }
  }

#if defined(__AVX2__)
  // The halves of the numbers in the upper bytes.
  static __m128i halves(__m128i x) {
    __m128i rest = _mm_and_si128(_mm_srli_epi16(x, 1), _mm_set1_epi16(0x3f80));
    return _mm_or_si128(rest, _mm_and_si128(x, _mm_set1_epi16((short)0x8000)));
  }
#endif
#if defined(__AVX512F__)
  static __m256i halves(__m256i x) {
    __m256i rest = _mm256_and_si256(_mm256_srli_epi16(x, 1), _mm256_set1_epi16(0x3f80));
    return _mm256_or_si256(rest, _mm256_and_si256(x, _mm256_set1_epi16((short)0x8000)));
  }
#endif
};

}  // namespace

size_t linear_fp8_shared(const LinearArgs& args, int) { return expanded_shared<E4m3>(args); }

void linear_fp8(const LinearArgs& args, const Worker& worker) { expanded_product<E4m3>(args, worker); }

void pack_fp8(const PackArgs& args, const Worker& worker) {
  int64_t depth = padded_ins(Format::fp8, args.ins, args.group), group = round_up(args.group, 32);
  int64_t blocks = depth / group, block_bytes = PANEL * 4 + group * PANEL;
  Share mine = share_of(round_up(args.outs, PANEL) / PANEL, worker);
  for (int64_t panel = mine.begin; panel < mine.end; panel++) {
    uint8_t* to = (uint8_t*)args.packed + panel * blocks * block_bytes;
    memset(to, 0, blocks * block_bytes);
    for (int64_t j = 0; j < PANEL && panel * PANEL + j < args.outs; j++) {
      int64_t out = panel * PANEL + j;
      const uint8_t* from = (const uint8_t*)args.data + out * args.ins;
      for (int64_t b = 0; b < blocks; b++) {
        memcpy(to + b * block_bytes + j * 4, (const float*)args.scales + out * blocks + b, 4);
      }
      for (int64_t k = 0; k < args.ins; k++) {
        int64_t i = k % group;
        to[k / group * block_bytes + PANEL * 4 + i / 2 * PANEL * 2 + j * 2 + i % 2] = from[k];
      }
    }
  }
}

}  // namespace localllm::LANE
