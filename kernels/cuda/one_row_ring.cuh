// The ring through which one block's weights come (one_row.cu): where it lies, who fills it, who goes around it.
#pragma once

#include "hopper.cuh"
#include "one_row_x.cuh"
#include "ring.cuh"

namespace localllm::cuda {
namespace {

// Bytes of an output in a stage, if it is not whole: neighbours lie in other banks. A copy takes its warp some 120
// cycles, whatever its size.
constexpr int SEGMENT = 2048, PITCH = SEGMENT + 16;
constexpr int STAGE = 8 * SEGMENT;    // bytes of a stage of whole outputs, at most; one alone is no larger
constexpr int MOST_STAGES = 12;
constexpr int TILES = 16;             // whose sums are added up together, a multiple of the teams
constexpr int CHUNKS = 16;            // sums of an output
constexpr int SUMS = CHUNKS * 8 + 8;  // words of a tile: those of neighbours lie in other banks
constexpr int SHARED = 113 << 10;     // bytes of a block: the next kernel's find room beside it

// Shared memory of a block, in bytes from its start: the ring's barriers, sums, activations and their scales, the ring.
struct Room {
  int sums, x, parts, ring, stage, stages;
  int chunks, subs;    // of an output
  int segments, rows;  // stages of a tile, and outputs of a stage

  template <class F>
  void lay_out(const ProductArgs& a, int limit) {
    auto up = [](int64_t bytes) { return int(round_up(bytes, 128)); };
    chunks = int((a.row_bytes + 63) / 64);
    subs = F::GROUP ? int((a.ins + F::GROUP - 1) / std::max(F::GROUP, 1)) : 0;
    rows = 8;
    while (F::WHOLE && rows > 1 && rows * a.row_bytes > STAGE) rows /= 2;
    segments = F::WHOLE ? 8 / rows : int((a.row_bytes + SEGMENT - 1) / SEGMENT);
    sums = up((TEAMS + 1) * MOST_STAGES * 8);
    x = up(sums + TILES * SUMS * 4);
    parts = up(x + chunks * F::CHUNK);
    ring = up(parts + std::max(1, chunks * F::PARTS) * int64_t(sizeof(Rounded)));
    stage = F::WHOLE ? up(rows * a.row_bytes) : 8 * PITCH + SEGMENT / 64 * F::PARTS * 32;
    stages = std::min(MOST_STAGES, (std::min(limit, SHARED) - 1024 - ring) / stage);
  }
};

// A block, which has every gridDim-th tile.
struct Block {
  const ProductArgs& a;
  const Room& room;
  char* memory;

  // A team knows by its own barrier that its stage is there: of those in between it keeps no count.
  __device__ uint64_t& full(int team, int slot) const {
    return reinterpret_cast<uint64_t*>(memory)[team * MOST_STAGES + slot];
  }
  __device__ uint64_t& empty(int slot) const { return full(TEAMS, slot); }
  __device__ int answers() const { return int(a.gated ? a.outs / 2 : a.outs); }
  __device__ int tiles() const {
    int all = (answers() + 7) / 8;
    return (all - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x) * (a.gated ? 2 : 1);
  }
  // The first output of a tile, divided by 8.
  __device__ int place_of(int tile) const {
    if (!a.gated) return int(blockIdx.x) + tile * int(gridDim.x);
    return int(blockIdx.x) + tile / 2 * int(gridDim.x) + tile % 2 * (answers() / 8);
  }
};

// Whole outputs, by one warp: what lies together is asked for and brought in the least time (the logits of 8B in int8
// take 122 µs on an H200, 135 with copies of 2 KB).
__device__ inline void fetch(const Block& b, Bytes) {
  const uint64_t policy = hopper::read_once();
  const int tiles = b.tiles(), rows = b.room.rows, row = int(b.a.row_bytes);
  int slot = 0, parity = 1, left = tiles * b.room.segments;
  for (int tile = 0; tile < tiles; tile++) {
    const int64_t place = b.place_of(tile);
    const int outputs = min(8, int(b.a.outs - place * 8));
    const char* from = static_cast<const char*>(b.a.weight) + place * 8 * row;
    for (int first = 0; first < 8; first += rows, from += rows * row, left--) {
      if (left == Bytes::EARLY) let_next_begin();
      const int bytes = max(0, min(rows, outputs - first)) * row;
      uint64_t& full = b.full(0, slot);
      hopper::await(b.empty(slot), parity);
      hopper::expect_copies(full, bytes);
      char* to = b.memory + b.room.ring + slot * b.room.stage;
      if (bytes && threadIdx.x % 32 == 0) hopper::copy(to, from, bytes, full, policy);
      hopper::hand_over(full);
      if (++slot == b.room.stages) slot = 0, parity ^= 1;
    }
  }
  let_next_begin();
}

// A segment of 8 outputs and their records, by one warp. Teams' tiles come side by side.
template <int PER_CHUNK>
__device__ inline void fetch(const Block& b, HalfBytes<PER_CHUNK>) {
  using F = HalfBytes<PER_CHUNK>;
  constexpr int RECORDS = SEGMENT / 64 * F::PARTS;  // of an output in a stage
  const uint64_t policy = hopper::read_once();
  const ProductArgs& a = b.a;
  const int lane = threadIdx.x % 32, tiles = b.tiles();
  int slot = 0, parity = 1, left = tiles * b.room.segments;
  for (int first = 0; first < tiles; first += TEAMS)
    for (int segment = 0; segment < b.room.segments; segment++)
      for (int tile = first; tile < min(first + TEAMS, tiles); tile++, left--) {
        if (left == F::EARLY) let_next_begin();
        const int64_t place = b.place_of(tile);
        const int outputs = min(8, int(a.outs - place * 8)), bytes = min(SEGMENT, int(a.row_bytes) - segment * SEGMENT);
        const int of_records = min(RECORDS, b.room.subs - segment * RECORDS) * 32;
        uint64_t& full = b.full(tile - first, slot);
        hopper::await(b.empty(slot), parity);
        hopper::expect_copies(full, outputs * bytes + (RECORDS ? of_records : 0));
        char* to = b.memory + b.room.ring + slot * b.room.stage;
        const auto* row = static_cast<const char*>(a.weight) + (place * 8 + lane) * a.row_bytes;
        if (lane < outputs) hopper::copy(to + lane * PITCH, row + segment * SEGMENT, bytes, full, policy);
        const auto* records = static_cast<const char*>(a.records) + (place * b.room.subs + segment * RECORDS) * 32;
        if (RECORDS && lane == 8) hopper::copy(to + 8 * PITCH, records, of_records, full, policy);
        hopper::hand_over(full);
        if (++slot == b.room.stages) slot = 0, parity ^= 1;
      }
  let_next_begin();
}

// A reader's way around the ring.
struct Turn {
  int slot, stages;
  uint32_t parities = 0;  // of its own barriers, a bit for each slot

  __device__ void pass(int count) {
    for (slot += count; slot >= stages;) slot -= stages;
  }
  __device__ void await(const Block& b, int team) {
    hopper::await(b.full(team, slot), parities >> slot & 1);
    parities ^= 1u << slot;
  }
};

}  // namespace
}  // namespace localllm::cuda
