// The weight formats in the tiled kernel (kernel.cuh). A chunk is 128 inputs. Each format describes its chunk in shared
// memory and multiplies a warp's rows and outputs of a chunk by mma.sync. Layouts of the weights:
// small_batch/formats.cuh.
//
//   lane = 4 g + t    activations: rows g and g + 8 of 16; weights: output g of 8
//                     sums: rows g (0, 1) and g + 8 (2, 3), outputs 2 t and 2 t + 1
//
// Addresses in shared memory permute the 16-byte units of a row, so that the lanes of a load use different banks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../device/mma.cuh"

namespace localllm::cuda {

static __device__ inline void load_matrices(uint32_t (&out)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(from));
}
static __device__ inline uint32_t shared_word(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}
static __device__ inline uint2 shared_words2(uint32_t from) {
  uint2 words;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(from));
  return words;
}
static __device__ inline uint4 shared_words4(uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(from));
  return words;
}

// COUNT words by one load.
template <int COUNT>
static __device__ inline void load_words(uint32_t (&words)[COUNT], uint32_t from) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
  if constexpr (COUNT == 4) {
    const uint4 four = shared_words4(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else if constexpr (COUNT == 2) {
    const uint2 two = shared_words2(from);
    words[0] = two.x, words[1] = two.y;
  } else {
    words[0] = shared_word(from);
  }
}

// Converts integers of magnitude below 2^22 exactly. The adder is faster than the conversion instruction.
static __device__ inline float small_to_float(int x) { return __int_as_float(x + 0x4b400000) - 12582912.0f; }
static __device__ inline float small_to_float(float x) { return x; }

// A chunk in shared memory, as a warp reads it. The addresses are those of the warp's first row and first output.
struct Chunk {
  uint32_t x, weight, records, row_scales;
  int row_pitch;  // rows of the tile: distance between the scales of groups, in words
};

// Activations in int8 [row][128 bytes]. The 16-byte units of a row are permuted by the row.
struct Int8Rows {
  static constexpr int X_BYTES = 1;
  static __device__ int x_unit(int row, int unit) { return unit ^ (row & 7); }
  // The operands of the inputs 32 k … 32 k + 31 of 16 rows.
  static __device__ void load(uint32_t (&a)[4], const Chunk& chunk, int first_row, int k, int lane) {
    const int row = first_row + lane % 16;
    load_matrices(a, chunk.x + row * 128 + ((2 * k + lane / 16) ^ (row & 7)) * 16);
  }
};

// Activations in bf16 [row][256 bytes]. Lane t reads 8 inputs of a row at a time.
struct Bf16Rows {
  static constexpr int X_BYTES = 2;
  static __device__ int x_unit(int row, int unit) { return unit ^ (row & 1) << 2; }
  // The inputs 32 k + 8 t … 32 k + 8 t + 7 of rows g and g + 8.
  static __device__ void load(uint4 (&a)[2], const Chunk& chunk, int first_row, int k, int lane) {
    const int g = lane / 4, unit = (4 * k + lane % 4) ^ (g & 1) << 2;
#pragma unroll
    for (int h = 0; h < 2; h++) a[h] = shared_words4(chunk.x + (first_row + g + 8 * h) * 256 + unit * 16);
  }
};

// int8 weights and activations (W8A8).
struct TiledInt8 : Int8Rows {
  using Sum = int;
  static constexpr int WEIGHT_BYTES = 128, RECORDS = 0;
  static constexpr bool ROUNDED = true, ROUNDED_IN_GROUPS = false;
  static __device__ int weight_unit(int output, int unit) { return unit ^ (output & 7); }

  template <int M, int N>
  static __device__ void multiply(int (&sums)[N][M][4], const Chunk& chunk, int lane) {
    const int output = lane / 16 * 8 + lane % 8, unit = lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      uint32_t a[M][4];
#pragma unroll
      for (int m = 0; m < M; m++) load(a[m], chunk, 16 * m, k, lane);
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        uint32_t b[4];
        load_matrices(b, chunk.weight + (8 * n + output) * 128 + ((2 * k + unit) ^ (output & 7)) * 16);
#pragma unroll
        for (int m = 0; m < M; m++) {
          multiply_add(sums[n][m], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          multiply_add(sums[n + 1][m], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
  }
};

// int4 weights, activations rounded to int8 in groups (W4A8). In every 32 inputs of x the even inputs come first.
// PER_CHUNK: groups per chunk, 1, 2 or 4.
template <int PER_CHUNK>
struct TiledInt4 : Int8Rows {
  using Sum = float;
  static constexpr int WEIGHT_BYTES = 64, RECORDS = PER_CHUNK;
  static constexpr bool ROUNDED = true, ROUNDED_IN_GROUPS = true;
  static __device__ int weight_unit(int, int unit) { return unit; }

  // Four nibbles minus their zero point, as int8.
  static __device__ uint32_t centred(uint32_t nibbles, uint32_t zeros) {
    return ((nibbles & 0x0f0f0f0fu | 0x80808080u) - zeros) ^ 0x80808080u;
  }
  template <int M, int N>
  static __device__ void multiply(float (&sums)[N][M][4], const Chunk& chunk, int lane) {
    const int g = lane / 4, t = lane % 4;
    constexpr int STEPS = 4 / PER_CHUNK;  // mma.sync per group
#pragma unroll
    for (int p = 0; p < PER_CHUNK; p++) {
      uint32_t a[STEPS][M][4];
      float row_scale[M][2];
#pragma unroll
      for (int m = 0; m < M; m++) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) load(a[k][m], chunk, 16 * m, p * STEPS + k, lane);
#pragma unroll
        for (int h = 0; h < 2; h++)
          row_scale[m][h] = __uint_as_float(
              shared_word(chunk.row_scales + (p * chunk.row_pitch + 16 * m + g + 8 * h) * 4));
      }
#pragma unroll
      for (int n = 0; n < N; n++) {
        const uint32_t record = chunk.records + (n * PER_CHUNK + p) * 32;
        const uint32_t zeros = __byte_perm(shared_word(record + g * 4), 0, 0x2222);
        const uint2 pair = shared_words2(record + t * 8);
        const float scale[2] = {__half2float(__ushort_as_half((unsigned short)pair.x)),
                                __half2float(__ushort_as_half((unsigned short)pair.y))};
        const uint32_t from = chunk.weight + (8 * n + g) * 64 + t * 16;
        uint32_t words[STEPS];
        load_words(words, from + p * STEPS * 4);
        int product[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) product[m][i] = 0;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
          const uint32_t even = centred(words[k], zeros), odd = centred(words[k] >> 4, zeros);
#pragma unroll
          for (int m = 0; m < M; m++)
            multiply_add(product[m], a[k][m][0], a[k][m][1], a[k][m][2], a[k][m][3], even, odd);
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            sums[n][m][i] += small_to_float(product[m][i]) * (scale[i % 2] * row_scale[m][i / 2]);
      }
    }
  }
};

// Four e4m3 values as bf16: values 0 and 1, values 2 and 3. The shifted bits of an e4m3 number are a bf16 number that is
// smaller by a factor of 2^120.
static __device__ inline uint2 widened_e4m3(uint32_t word) {
  auto widen = [](uint32_t bytes) {
    return multiplied((bytes & 0x80008000u) | (bytes >> 4 & 0x07f007f0u), 0x7b807b80u);
  };
  return {widen(__byte_perm(word, 0, 0x1404)), widen(__byte_perm(word, 0, 0x3424))};
}

// e4m3 weights, bf16 activations (W8A16). With groups, a chunk has the scales of its two halves.
template <bool GROUPED>
struct TiledFp8 : Bf16Rows {
  using Sum = float;
  static constexpr int WEIGHT_BYTES = 128, RECORDS = GROUPED ? 2 : 0;
  static constexpr bool ROUNDED = false, ROUNDED_IN_GROUPS = false;
  static __device__ int weight_unit(int output, int unit) { return unit ^ (output & 3) << 1; }

  template <int M, int N>
  static __device__ void multiply_step(float (&sums)[N][M][4], const Chunk& chunk, int k, int lane) {
    const int g = lane / 4, t = lane % 4;
    uint4 a[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) load(a[m], chunk, 16 * m, k, lane);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int unit = (2 * k + t / 2) ^ (g & 3) << 1;
      const uint2 words = shared_words2(chunk.weight + (8 * n + g) * 128 + unit * 16 + t % 2 * 8);
      const uint2 first = widened_e4m3(words.x), second = widened_e4m3(words.y);
#pragma unroll
      for (int m = 0; m < M; m++)
        multiply_add(sums[n][m], a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, first.x, first.y);
#pragma unroll
      for (int m = 0; m < M; m++)
        multiply_add(sums[n][m], a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w, second.x, second.y);
    }
  }
  template <int M, int N>
  static __device__ void multiply(float (&sums)[N][M][4], const Chunk& chunk, int lane) {
    if constexpr (!GROUPED) {
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_step(sums, chunk, k, lane);
    } else {
#pragma unroll 1  // fewer registers
      for (int p = 0; p < 2; p++) {
        float products[N][M][4] = {};
        multiply_step(products, chunk, 2 * p, lane);
        multiply_step(products, chunk, 2 * p + 1, lane);
#pragma unroll
        for (int n = 0; n < N; n++) {
          const uint2 pair = shared_words2(chunk.records + (n * 2 + p) * 32 + lane % 4 * 8);
#pragma unroll
          for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
              sums[n][m][i] += products[n][m][i] * __uint_as_float(i % 2 ? pair.y : pair.x);
        }
      }
    }
  }
};

// e4m3 weights and activations (W8A8). Only Hopper has kernels of this format.
struct HopperFp8 {
  using Sum = float;
  static constexpr int X_BYTES = 1, WEIGHT_BYTES = 128, RECORDS = 0;
  static constexpr bool ROUNDED = true, ROUNDED_IN_GROUPS = false;
};

// int4 weights, bf16 activations (W4A16).
template <int PER_CHUNK>
struct TiledInt4Wide : Bf16Rows {
  using Sum = float;
  static constexpr int WEIGHT_BYTES = 64, RECORDS = PER_CHUNK;
  static constexpr bool ROUNDED = false, ROUNDED_IN_GROUPS = false;
  static __device__ int weight_unit(int, int unit) { return unit; }

  // Nibbles 0 and 4 of a word minus their zero point, as bf16. `bias`: -(128 + zero point), twice.
  static __device__ uint32_t centred(uint32_t word, uint32_t bias) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(result) : "r"(word & 0x000f000fu | 0x43004300u), "r"(0x3f803f80u), "r"(bias));
    return result;
  }
  template <int M, int N>
  static __device__ void multiply(float (&sums)[N][M][4], const Chunk& chunk, int lane) {
    const int g = lane / 4, t = lane % 4;
    constexpr int STEPS = 4 / PER_CHUNK;
#pragma unroll 1  // fewer registers
    for (int p = 0; p < PER_CHUNK; p++) {
      float products[N][M][4] = {};
      uint32_t bias[N];
#pragma unroll
      for (int n = 0; n < N; n++) {
        const uint32_t record = shared_word(chunk.records + (n * PER_CHUNK + p) * 32 + g * 4);
        bias[n] = __byte_perm(record, 0, 0x3232) | 0xc300c300u;
      }
#pragma unroll
      for (int k = p * STEPS; k < (p + 1) * STEPS; k++) {
        uint4 a[M][2];
#pragma unroll
        for (int m = 0; m < M; m++) {
          load(a[m], chunk, 16 * m, k, lane);
#pragma unroll
          for (int h = 0; h < 2; h++)  // pairs of inputs 0 and 4, 1 and 5, 2 and 6, 3 and 7
            a[m][h] = {__byte_perm(a[m][h].x, a[m][h].z, 0x5410), __byte_perm(a[m][h].x, a[m][h].z, 0x7632),
                       __byte_perm(a[m][h].y, a[m][h].w, 0x5410), __byte_perm(a[m][h].y, a[m][h].w, 0x7632)};
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
          const uint32_t word = shared_word(chunk.weight + (8 * n + g) * 64 + t * 16 + k * 4);
          uint32_t b[4];
#pragma unroll
          for (int i = 0; i < 4; i++) b[i] = centred(word >> 4 * i, bias[n]);
#pragma unroll
          for (int m = 0; m < M; m++)
            multiply_add(products[n][m], a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, b[0], b[1]);
#pragma unroll
          for (int m = 0; m < M; m++)
            multiply_add(products[n][m], a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w, b[2], b[3]);
        }
      }
#pragma unroll
      for (int n = 0; n < N; n++) {
        const uint2 pair = shared_words2(chunk.records + (n * PER_CHUNK + p) * 32 + t * 8);
        const float scale[2] = {__half2float(__ushort_as_half((unsigned short)pair.x)),
                                __half2float(__ushort_as_half((unsigned short)pair.y))};
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) sums[n][m][i] += products[n][m][i] * scale[i % 2];
      }
    }
  }
};

}  // namespace localllm::cuda
