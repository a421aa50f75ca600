// Upper bounds of the hardware: loops that only read memory or only repeat one kind of instruction. Benchmarks compare
// kernels with their rates.
#pragma once

#include <stdint.h>

#include "team/worker.h"

namespace localllm {

enum class Bound : int {
  read = 0,       // reads a buffer once per repeat; counts bytes
  f32 = 1,        // multiply-adds in registers; this kind and all below count operations, two per multiply-add
  bf16 = 2,       // dot products of two bf16 values (AVX512-BF16)
  int8 = 3,       // dot products of four int8 values (VNNI; with AVX2, three instructions)
  tile_bf16 = 4,  // AMX tile products of bf16 values
  tile_int8 = 5,
};

struct BoundArgs {
  Bound kind;
  const void* data;  // the buffer that the loop `read` reads, 64-byte aligned
  int64_t bytes, repeats;
  double* counts;  // [workers] bytes or operations of each worker; 0 if the ISA variant lacks the instruction
};

}  // namespace localllm
