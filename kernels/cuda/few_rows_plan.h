// The tile sizes of a product of 1 to 16 rows, from its shape and the limits of the GPU. Plain C++, so that tests need
// no GPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace localllm::cuda {

constexpr int LOG_THREADS = 9, THREADS = 1 << LOG_THREADS, WARPS = THREADS / 32, MAX_SLOTS = 12;
constexpr int HELD = 4;  // vectors of 8 activations per thread that OwnRows keeps in registers
constexpr int OWN_LIMIT = 32 << 10;  // bytes: limit of the activations that every block prepares in shared memory
constexpr int BUDGET = 110 << 10;    // bytes of shared memory per block: a block of the next kernel fits beside it
constexpr int STATIC = 1 << 10;      // bytes of shared memory for static variables and the driver

// The properties of a weight format (formats.cuh) that a plan depends on.
struct Traits {
  int x_bytes, pieces, chunk, records;
  bool rounded_in_groups;

  // True if activations take so many registers that large tiles would spill.
  constexpr bool heavy() const { return pieces * x_bytes == 8; }
  // True if tiles of 32 outputs and steps of several chunks are compiled; not for small groups, which are rare.
  constexpr bool many_tiles() const { return records <= 1 && !heavy(); }
  // Chunks per step of a warp in tiles of 8 outputs.
  constexpr int depth(int nt) const { return many_tiles() && nt == 1 && pieces < 4 ? 2 : 1; }
};

struct Shape {
  int rows, outs, subs, group;
  int64_t row_bytes;
  bool gated;
};

struct Limits {
  int processors, shared;  // multiprocessors; bytes of shared memory per block
};

// The sizes of one launch: tiles of 8 * j outputs, p chunks per step of a warp, nt groups of 8 rows.
struct Cut {
  int j, p, nt, slots, slot_bytes, tables, shared;

  bool fits() const { return slots >= 2; }
};

// Bytes of a row of activations that every block prepares in shared memory; 0: they come through the ring.
constexpr int own_pitch(const Traits& f, const Shape& a) {
  const int64_t chunks = (a.row_bytes + 63) / 64, pitch = chunks * f.chunk * f.x_bytes + 16;
  const bool groups = !f.rounded_in_groups || a.group == 32 || a.group == 64 || a.group == 128;
  const int rows = a.rows == 1 ? 1 : a.rows == 2 ? 2 : a.rows <= 4 ? 4 : 8;
  const bool held = chunks * f.chunk <= HELD * 8 * THREADS / rows;
  return a.rows <= 8 && groups && held && a.rows * pitch <= OWN_LIMIT ? int(pitch) : 0;
}

// Blocks of 8 outputs per tile: the largest of 4, 2 and 1 that keeps at least 90 % of the best utilisation of the
// multiprocessors.
inline int outputs_of_tile(int64_t blocks, bool gated, int processors) {
  auto busy = [&](int64_t each) {
    int64_t tiles = (blocks + each - 1) / each, turns = (tiles + processors - 1) / processors;
    return double(blocks) / double(turns * processors * each);
  };
  double best = std::max({busy(4), busy(2), gated ? 0.0 : busy(1)});
  if (busy(4) >= 0.9 * best) return 4;
  return busy(2) >= 0.9 * best || gated ? 2 : 1;
}

// The shared memory of tiles of 8 * j outputs. Uses two buffers for partial sums if they are small and fit.
inline Cut cut_of(const Traits& f, const Shape& a, int pitch, int limit, int j, int p) {
  const int nt = a.rows <= 8 ? 1 : 2, table = WARPS * j * a.rows * 8 * 4;
  Cut cut{j, p, nt, 0, THREADS * j * p * (16 + 4 * f.records), 0, 0};
  int own = 0;
  if (pitch)
    own = a.rows * (pitch + 4) + (f.rounded_in_groups ? a.rows * a.subs * 4 : 0);
  else
    cut.slot_bytes += THREADS * p * nt * (f.pieces * 8 * f.x_bytes + (f.rounded_in_groups ? 4 * f.records : 0));
  for (cut.tables = table <= 8 << 10 ? 2 : 1; cut.tables > 0; cut.tables--) {
    const int most = limit - STATIC, others = cut.tables * table + own;
    int room = std::min(most, f.records == 0 ? BUDGET : most) - others;
    if (room < 3 * cut.slot_bytes) room = most - others;
    cut.slots = std::max(0, std::min(MAX_SLOTS, room / cut.slot_bytes));
    cut.shared = cut.slots * cut.slot_bytes + others;
    if (cut.fits()) break;
  }
  return cut;
}

// The best tiles that fit in shared memory, else a Cut whose fits() is false. A tile has both halves of gated outputs.
inline Cut cut_of(const Traits& f, const Shape& a, int pitch, const Limits& gpu) {
  const int each = outputs_of_tile((a.outs + 7) / 8, a.gated, gpu.processors), depth = f.depth(a.rows <= 8 ? 1 : 2);
  Cut cut{};
  auto tried = [&](int j, int p) { return (cut = cut_of(f, a, pitch, gpu.shared, j, p)).fits(); };
  if (f.many_tiles() && each == 4 && tried(4, 1)) return cut;
  if (f.many_tiles() && each == 1 && tried(1, depth)) return cut;
  if (!tried(2, 1) && !a.gated) tried(1, depth);
  return cut;
}

// Rows per launch: all, or half of them if shared memory is too small for all; each launch reads all weights. 0: half
// of the rows do not fit either. `pitch` (see own_pitch) applies to both halves.
inline int rows_at_once(const Traits& f, const Shape& a, int pitch, const Limits& gpu) {
  if (cut_of(f, a, pitch, gpu).fits()) return a.rows;
  Shape half = a;
  half.rows = (a.rows + 1) / 2;
  return half.rows < a.rows && cut_of(f, half, pitch, gpu).fits() ? half.rows : 0;
}

// True if the GPU can compute the product. A fused norm requires activations that every block prepares.
inline bool fits(const Traits& f, const Shape& a, bool normed, const Limits& gpu) {
  const int pitch = own_pitch(f, a);
  return (pitch || !normed) && rows_at_once(f, a, pitch, gpu) > 0;
}

// The records of a grouped format. per_sub: chunks that one record covers; subs: records per output.
struct Subs {
  int per_sub, subs;
};
constexpr Subs subs_of(const Traits& f, int64_t ins, int64_t group) {
  const int64_t sub = f.chunk == 128 ? 128 / std::max(f.records, 1) : std::min(group, ins);
  return {int((sub + f.chunk - 1) / f.chunk), int((ins + sub - 1) / sub)};
}

// The traits of the weight formats (linear.h).
constexpr Traits BF16{2, 1, 32, 0, false}, WHOLE8{1, 2, 64, 0, false};
constexpr Traits e4m3(bool grouped) { return {2, 2, 64, grouped, false}; }
constexpr Traits nibbles(bool wide, int per_chunk) { return {wide ? 2 : 1, 4, 128, per_chunk, !wide}; }

}  // namespace localllm::cuda
