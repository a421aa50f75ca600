// The ring buffer of weights of hopper.cu: its layout, its producer warp, and the position of a consumer.
#pragma once

#include "../../device/hopper.cuh"
#include "activations.cuh"
#include "../../device/ring.cuh"

namespace localllm::cuda {
namespace {

// Bytes of an output in a stage, and the pitch between outputs, which avoids bank conflicts. The time that a warp
// needs to start a copy does not depend on the size, so segments are large.
constexpr int SEGMENT = 2048, PITCH = SEGMENT + 16;
constexpr int MAX_STAGES = 12;
constexpr int TILES = 16;             // tiles per reduction, a multiple of TEAMS
constexpr int CHUNKS = 16;            // partial sums per output
constexpr int SUMS = CHUNKS * 8 + 8;  // 32-bit words per tile, padded to avoid bank conflicts
constexpr int SHARED = 113 << 10;     // bytes per block: a block of the next kernel fits beside it

// The layout of shared memory. Byte offsets, in this order: barriers (0), sums, activations with their scales, ring.
struct Layout {
  int sums, x, ring, stage, stages;
  int chunks, subgroups;  // chunks per output; scales (with zero points) per output
  int segments;           // stages per tile

  template <class F>
  void compute(const ProductArgs& a, int limit) {
    auto align = [](int64_t bytes) { return int(round_up(bytes, 128)); };
    chunks = int((a.row_bytes + 63) / 64);
    subgroups = int((a.in_features + F::GROUP - 1) / F::GROUP);
    segments = int((a.row_bytes + SEGMENT - 1) / SEGMENT);
    sums = align((TEAMS + 1) * MAX_STAGES * 8);
    x = align(sums + TILES * SUMS * 4);
    const int groups = x + chunks * F::CHUNK;  // where OneRow puts the scales of the activations
    ring = align(groups + chunks * F::GROUPS * int64_t(sizeof(Rounded)));
    stage = 8 * PITCH + SEGMENT / 64 * F::GROUPS * 32;
    stages = std::min(MAX_STAGES, (std::min(limit, SHARED) - 1024 - ring) / stage);
  }
};

// State that the threads of a block share. Tile i of block b is tile b + i * gridDim of the product (without gates).
struct Block {
  const ProductArgs& a;
  const Layout& layout;
  char* memory;

  // Each team has separate `full` barriers, so that it counts only the phases of its stages.
  __device__ uint64_t& full(int team, int slot) const {
    return reinterpret_cast<uint64_t*>(memory)[team * MAX_STAGES + slot];
  }
  __device__ uint64_t& empty(int slot) const { return full(TEAMS, slot); }
  __device__ int outputs() const { return int(a.gated ? a.out_features / 2 : a.out_features); }
  __device__ int tiles() const {
    int output_blocks = (outputs() + 7) / 8;
    return (output_blocks - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x) * (a.gated ? 2 : 1);
  }
  // The first output of a tile, divided by 8.
  __device__ int output_block_of(int tile) const {
    if (!a.gated) return int(blockIdx.x) + tile * int(gridDim.x);
    return int(blockIdx.x) + tile / 2 * int(gridDim.x) + tile % 2 * (outputs() / 8);
  }
};

// The loop of the producer warp. A stage has the values of a part of 8 outputs, and the scales and zero points of their
// groups. Stages of the tile of team 0 and of team 1 alternate.
template <class F>
__device__ inline void fetch(const Block& b) {
  constexpr int EARLY = 4;  // the next kernel may start when this many stages are not requested yet
  constexpr int RECORDS = SEGMENT / 64 * F::GROUPS;  // scales (with zero points) per output and stage
  const uint64_t policy = hopper::evict_first();
  const ProductArgs& a = b.a;
  const int lane = threadIdx.x % 32, tiles = b.tiles();
  int slot = 0, parity = 1, left = tiles * b.layout.segments;
  for (int first = 0; first < tiles; first += TEAMS)
    for (int segment = 0; segment < b.layout.segments; segment++)
      for (int tile = first; tile < min(first + TEAMS, tiles); tile++, left--) {
        if (left == EARLY) launch_dependents();
        const int64_t output_block = b.output_block_of(tile);
        const int outputs = min(8, int(a.out_features - output_block * 8));
        const int bytes = min(SEGMENT, int(a.row_bytes) - segment * SEGMENT);
        const int record_bytes = min(RECORDS, b.layout.subgroups - segment * RECORDS) * 32;
        uint64_t& full = b.full(tile - first, slot);
        hopper::wait_barrier(b.empty(slot), parity);
        hopper::expect_bytes(full, outputs * bytes + record_bytes);
        char* to = b.memory + b.layout.ring + slot * b.layout.stage;
        const auto* row = static_cast<const char*>(a.weight) + (output_block * 8 + lane) * a.row_bytes;
        if (lane < outputs) hopper::copy(to + lane * PITCH, row + segment * SEGMENT, bytes, full, policy);
        const auto* records =
            static_cast<const char*>(a.records) + (output_block * b.layout.subgroups + segment * RECORDS) * 32;
        if (lane == 8) hopper::copy(to + 8 * PITCH, records, record_bytes, full, policy);
        hopper::commit_stage(full);
        if (++slot == b.layout.stages) {
          slot = 0;
          parity ^= 1;
        }
      }
  launch_dependents();
}

// The position of a consumer thread in the ring.
struct RingPosition {
  int slot, stages;
  uint32_t parities = 0;  // bit s: parity of the next phase of the team's `full` barrier of slot s

  __device__ void advance(int count) {
    for (slot += count; slot >= stages;) slot -= stages;
  }
  __device__ void wait_barrier(const Block& b, int team) {
    hopper::wait_barrier(b.full(team, slot), parities >> slot & 1);
    parities ^= 1u << slot;
  }
};

}  // namespace
}  // namespace localllm::cuda
