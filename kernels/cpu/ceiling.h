// What the hardware gives at most: loops of nothing but one kind of instruction, against which kernels are measured.
#pragma once

#include <stdint.h>

#include "worker.h"

namespace localllm {

enum class Ceiling : int {
  read = 0,       // all of a buffer, once for each turn; counts bytes
  f32 = 1,        // multiply-adds in registers; these count operations, two for a multiply-add
  bf16 = 2,       // dot products of pairs (AVX512-BF16)
  int8 = 3,       // dot products of fours (VNNI), or with AVX2 the three instructions that make one
  tile_bf16 = 4,  // AMX
  tile_int8 = 5,
};

struct CeilingArgs {
  Ceiling kind;
  const void* data;  // read: 64-byte aligned
  int64_t bytes, turns;
  double* done;  // [workers] what each has counted; 0 where the lane has no such instruction
};

}  // namespace localllm
