// The weight formats in the small-batch kernel. A lane multiplies 16 bytes of weights of one output with the
// activations of the same inputs, in vectors of 8. A chunk is 64 bytes of one output, which four lanes read.
#pragma once

#include "kernel.cuh"

namespace localllm::cuda {

static __device__ inline uint32_t load_word(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}

// One mma.sync over 16 inputs (bf16) or 32 inputs (int8), for NT groups of 8 rows. Each operand is a pair of registers.
template <int NT, class Sum>
static __device__ inline void pair(Sum (&sum)[4], const uint32_t (&x)[NT][2], uint32_t w0, uint32_t w1) {
  multiply_add(sum, x[0][0], NT == 2 ? x[NT - 1][0] : 0, x[0][1], NT == 2 ? x[NT - 1][1] : 0, w0, w1);
}

// bf16, [out_features, in_features].
struct Bf16 {
  using X = __nv_bfloat16;
  using Sum = float;
  static constexpr Traits TRAITS = BF16;
  static constexpr int VECTORS = TRAITS.vectors, CHUNK = TRAITS.chunk, RECORDS = TRAITS.records;
  static constexpr bool ROUNDED_IN_GROUPS = TRAITS.rounded_in_groups;
  static __device__ int input_of(int, int t) { return 8 * t; }
  static __device__ int subgroup_of(const SmallBatch&, int, int) { return 0; }
  template <int NT>
  struct Activations {
    uint32_t x[2][NT][2];
    __device__ explicit Activations(const uint32_t (&from)[NT][1][4]) {
#pragma unroll
      for (int h = 0; h < NT; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[i / 2][h][i % 2] = from[h][0][i];
    }
    template <class S>
    __device__ void multiply(float (&sum)[4], const uint32_t (&w)[4], const S&, const PreparedRows<Bf16>&, int, int,
                             int, int) const {
      pair<NT>(sum, x[0], w[0], w[1]);
      pair<NT>(sum, x[1], w[2], w[3]);
    }
  };
};

// int8 with int8 activations, [out_features, in_features].
struct Int8 {
  using X = int8_t;
  using Sum = int;
  static constexpr Traits TRAITS = INT8;
  static constexpr int VECTORS = TRAITS.vectors, CHUNK = TRAITS.chunk, RECORDS = TRAITS.records;
  static constexpr bool ROUNDED_IN_GROUPS = TRAITS.rounded_in_groups;
  static __device__ int input_of(int vector, int t) { return 16 * t + 8 * vector; }
  static __device__ int subgroup_of(const SmallBatch&, int, int) { return 0; }
  template <int NT>
  struct Activations {
    uint32_t x[2][NT][2];
    __device__ explicit Activations(const uint32_t (&from)[NT][2][2]) {
#pragma unroll
      for (int h = 0; h < NT; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[i / 2][h][i % 2] = from[h][i / 2][i % 2];
    }
    template <class S>
    __device__ void multiply(int (&sum)[4], const uint32_t (&w)[4], const S&, const PreparedRows<Int8>&, int, int, int,
                             int) const {
      pair<NT>(sum, x[0], w[0], w[1]);
      pair<NT>(sum, x[1], w[2], w[3]);
    }
  };
};

// e4m3, [out_features, in_features]. `records` has the float32 scale of each group of inputs; the group size is a
// multiple of 64. Without groups there is one scale per output, as in int8.
template <bool GROUPED>
struct E4m3 {
  using X = __nv_bfloat16;
  using Sum = float;
  static constexpr Traits TRAITS = e4m3(GROUPED);
  static constexpr int VECTORS = TRAITS.vectors, CHUNK = TRAITS.chunk, RECORDS = TRAITS.records;
  static constexpr bool ROUNDED_IN_GROUPS = TRAITS.rounded_in_groups;
  static __device__ int input_of(int vector, int t) { return 16 * t + 8 * vector; }
  static __device__ int subgroup_of(const SmallBatch& a, int chunk, int) { return chunk / a.chunks_per_subgroup; }

  // Converts bytes 1 and 3 of a word from e4m3 to bf16, exactly. The shifted bits of an e4m3 number are a bf16 number
  // that is smaller by a factor of 2^120.
  static __device__ uint32_t widen(uint32_t word) {
    return multiplied((word & 0x80008000u) | (word >> 4 & 0x07f007f0u), 0x7b807b80u);
  }
  template <int NT>
  struct Activations {
    uint32_t x[4][NT][2];  // for each word of weights: inputs 1 and 3, then inputs 0 and 2
    __device__ explicit Activations(const uint32_t (&from)[NT][2][4]) {
#pragma unroll
      for (int h = 0; h < NT; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          uint32_t low = from[h][i / 2][i % 2 * 2], high = from[h][i / 2][i % 2 * 2 + 1];
          x[i][h][0] = __byte_perm(low, high, 0x7632);
          x[i][h][1] = __byte_perm(low, high, 0x5410);
        }
    }
    template <class S>
    __device__ void multiply(float (&sum)[4], const uint32_t (&w)[4], const S& s, const PreparedRows<E4m3>&, int,
                             int slot, int i, int) const {
      if constexpr (!GROUPED) {
#pragma unroll
        for (int k = 0; k < 4; k++) pair<NT>(sum, x[k], widen(w[k]), widen(w[k] << 8));
        return;
      }
      float product[4] = {};
#pragma unroll
      for (int k = 0; k < 4; k++) pair<NT>(product, x[k], widen(w[k]), widen(w[k] << 8));
      float record_scale = __uint_as_float(load_word(s.record_address(slot, i)));
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float scale = __shfl_sync(0xffffffffu, record_scale, (2 * s.t + c) * 4);
        sum[c] += product[c] * scale;
        if (NT == 2) sum[2 + c] += product[2 + c] * scale;
      }
    }
  };
};

// int4: two inputs per byte, the even input in the low nibble. The 16 words of every 64 bytes are stored as a
// transposed 4 x 4 matrix: word r of lane t has inputs 32 r + 8 t … 32 r + 8 t + 7, so the four lanes of an output are
// in the same group at the same time. `records` has one word for each group: the float16 scale in the low half and the
// zero point in the high half.
//
// Nibbles are multiplied without full conversion: as bf16 with the nibble in the low mantissa bits (its value is nibble
// + 128), or as bytes. At the end of a group, the sum of the activations times 128 + zero point (bf16) or times the
// zero point (bytes) is subtracted. The sum of the activations is an mma with ones.
template <bool WIDE, int PER_CHUNK>
struct Nibbles {
  using X = std::conditional_t<WIDE, __nv_bfloat16, int8_t>;
  using Sum = float;
  using Partial = std::conditional_t<WIDE, float, int>;
  static constexpr Traits TRAITS = nibbles(WIDE, PER_CHUNK);  // PER_CHUNK: groups per chunk, 1, 2 or 4
  static constexpr int VECTORS = TRAITS.vectors, CHUNK = TRAITS.chunk, RECORDS = TRAITS.records;
  static constexpr bool ROUNDED_IN_GROUPS = TRAITS.rounded_in_groups;
  static __device__ int input_of(int vector, int t) { return 32 * vector + 8 * t; }
  static __device__ int subgroup_of(const SmallBatch&, int chunk, int r) { return chunk * PER_CHUNK + r; }

  // The scale in a word of `records`, and the number that is subtracted per activation (see above).
  static __device__ float scale_of(uint32_t record) { return __half2float(__ushort_as_half((unsigned short)record)); }
  static __device__ Partial surplus_of(uint32_t record) {
    if constexpr (WIDE) return __uint_as_float(0x43000000u | (record & 0xffff0000u));
    else return int(record >> 16);
  }

  template <int NT>
  struct Activations {
    uint32_t x[4][WIDE ? 2 : 1][NT][2];
    Partial total[4][NT];  // sums of the activations of each word

    __device__ explicit Activations(const uint32_t (&from)[NT][4][WIDE ? 4 : 2]) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int h = 0; h < NT; h++) {
          const auto& vector = from[h][k];
          if constexpr (WIDE) {  // register pairs: inputs 0 and 4, 1 and 5; 2 and 6, 3 and 7
            x[k][0][h][0] = __byte_perm(vector[0], vector[2], 0x5410);
            x[k][0][h][1] = __byte_perm(vector[0], vector[2], 0x7632);
            x[k][1][h][0] = __byte_perm(vector[1], vector[3], 0x5410);
            x[k][1][h][1] = __byte_perm(vector[1], vector[3], 0x7632);
          } else {  // register pair: even inputs, odd inputs
            x[k][0][h][0] = __byte_perm(vector[0], vector[1], 0x6420);
            x[k][0][h][1] = __byte_perm(vector[0], vector[1], 0x7531);
          }
        }
        Partial sums[4] = {};
        constexpr uint32_t ones = WIDE ? 0x3f803f80u : 0x01010101u;
        pair<NT>(sums, x[k][0], ones, ones);
        if (WIDE) pair<NT>(sums, x[k][WIDE], ones, ones);
#pragma unroll
        for (int h = 0; h < NT; h++) total[k][h] = sums[2 * h];
      }
    }
    // Multiplies words k and k + 1; only word k if `both` is false.
    __device__ void multiply_words(Partial (&even)[4], Partial (&odd)[4], int k, uint32_t first, uint32_t second,
                                   bool both) const {
      if constexpr (WIDE) {
        auto one = [&](int index, uint32_t word) {
          uint32_t w[4];
#pragma unroll
          for (int i = 0; i < 4; i++) w[i] = (word >> 4 * i & 0x000f000fu) | 0x43004300u;
          pair<NT>(even, x[index][0], w[0], w[1]);
          pair<NT>(even, x[index][WIDE], w[2], w[3]);
        };
        one(k, first);
        if (both) one(k + 1, second);
      } else {
        if (!both) second = 0;
        int other = min(k + 1, 3);
        multiply_add(even, x[k][0][0][0], NT == 2 ? x[k][0][NT - 1][0] : 0, x[other][0][0][0],
                     NT == 2 ? x[other][0][NT - 1][0] : 0, first & 0x0f0f0f0fu, second & 0x0f0f0f0fu);
        multiply_add(odd, x[k][0][0][1], NT == 2 ? x[k][0][NT - 1][1] : 0, x[other][0][0][1],
                     NT == 2 ? x[other][0][NT - 1][1] : 0, first >> 4 & 0x0f0f0f0fu, second >> 4 & 0x0f0f0f0fu);
      }
    }
    template <class S>
    static __device__ float row_scale(const S& s, const PreparedRows<Nibbles>& rows, int row, int subgroup, int slot,
                                      int i) {
      if (WIDE || row >= s.a.rows) return 1.0f;
      if (!s.a.prepared_pitch) return __uint_as_float(load_word(s.subgroup_scale_address(slot, i)));
      return subgroup < s.a.subgroups ? rows.subgroup_scale[row * s.a.subgroups + subgroup] : 0.0f;
    }
    template <class S>
    __device__ void multiply(float (&sum)[4], const uint32_t (&w)[4], const S& s, const PreparedRows<Nibbles>& rows,
                             int step, int slot, int i, int p) const {
      Partial even[4] = {}, odd[4] = {};
      auto end_group = [&](int r, int first, int words) {
        uint32_t record = load_word(s.record_address(slot, i * PER_CHUNK + r));
        uint32_t records[2] = {__shfl_sync(0xffffffffu, record, 8 * s.t), __shfl_sync(0xffffffffu, record, 8 * s.t + 4)};
#pragma unroll
        for (int h = 0; h < NT; h++) {
          int subgroup = s.chunk_of(step, p) * PER_CHUNK + r;
          float row = row_scale(s, rows, s.g + 8 * h, subgroup, slot, (p * NT + h) * PER_CHUNK + r);
          Partial activation_sum = total[first][h];
          if (words > 1) activation_sum += total[first + 1][h];
          if (words > 2) activation_sum += total[2][h] + total[3][h];
#pragma unroll
          for (int c = 0; c < 2; c++) {
            Partial product = even[2 * h + c] + (WIDE ? 0 : odd[2 * h + c]) - surplus_of(records[c]) * activation_sum;
            sum[2 * h + c] += float(product) * (scale_of(records[c]) * row);
          }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) even[c] = odd[c] = 0;
      };
      if constexpr (PER_CHUNK <= 2) {
        multiply_words(even, odd, 0, w[0], w[1], true);
        if (PER_CHUNK == 2) end_group(0, 0, 2);
        multiply_words(even, odd, 2, w[2], w[3], true);
        if (PER_CHUNK == 2) end_group(1, 2, 2);
        else end_group(0, 0, 4);
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
          multiply_words(even, odd, k, w[k], 0, false);
          end_group(k, k, 1);
        }
      }
    }
  };
};

}  // namespace localllm::cuda
