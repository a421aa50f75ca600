// Prefill attention: tiles, and the layout of shared memory.
#pragma once

#include "prefill.h"
#include "../device/hopper.cuh"

namespace localllm::cuda {
namespace {

constexpr int TILE_ROWS = PREFILL_TILE_ROWS, BLOCK = 128, STAGES = 2;
constexpr int GROUP = 128, THREADS = 3 * GROUP, CONSUMER_THREADS = 2 * GROUP;
constexpr unsigned ALL = 0xffffffff;

struct Maps {
  CUtensorMap query, keys, values;
};

// `count` consecutive queries of a row, with all query heads of one kv head.
struct Tile {
  int token;    // token index of the first query
  int count;    // number of queries; 0: no tile is left
  int before;   // number of positions of the row before the first query
  int context;  // context length of the row
  int kv_head, row;
  int low, high;  // first and last block of visible positions
};
constexpr int TILE_NUMBERS = sizeof(Tile) / sizeof(int);

template <class T, int DIM>
struct Shared {
  static constexpr int BYTES = TILE_ROWS * DIM * 2;  // bytes of one buffer of queries, keys or values
  T query[2][TILE_ROWS * DIM];    // [dim / 64][row][64]
  T keys[STAGES][BLOCK * DIM];    // [position / 8][dim / 64][8][64]
  T values[STAGES][BLOCK * DIM];  // layout as `keys`
  uint64_t query_full[2], query_empty[2];
  uint64_t keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
  int tiles[2][TILE_NUMBERS];
  float scratch[CONSUMER_THREADS];  // see store_unread in prefill_consumer.cuh
};

// One lane writes a tile to shared memory, a warp reads it. Both use atomics, because racecheck does not know the order
// that transaction barriers give.
__device__ inline void write_tile(int (&numbers)[TILE_NUMBERS], const Tile& tile) {
  const int from[] = {tile.token, tile.count, tile.before, tile.context, tile.kv_head, tile.row, tile.low, tile.high};
#pragma unroll
  for (int i = 0; i < TILE_NUMBERS; i++) atomicExch(&numbers[i], from[i]);
}
__device__ inline Tile read_tile(int (&numbers)[TILE_NUMBERS]) {
  int number = atomicOr(&numbers[threadIdx.x % TILE_NUMBERS], 0), to[TILE_NUMBERS];
#pragma unroll
  for (int i = 0; i < TILE_NUMBERS; i++) to[i] = __shfl_sync(ALL, number, i);
  return {to[0], to[1], to[2], to[3], to[4], to[5], to[6], to[7]};
}

// An index into a ring buffer, and the parity of its phase.
template <int SIZE>
struct Ring {
  int index = 0, parity = 0;
  __device__ void next() {
    if (++index == SIZE) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Bytes of shared memory: Shared, and padding for the alignment to ATOM.
template <class T, int DIM>
constexpr int SHARED_BYTES = int(sizeof(Shared<T, DIM>)) + hopper::ATOM;

}  // namespace
}  // namespace localllm::cuda
