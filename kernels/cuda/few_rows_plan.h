// How a product of few rows is cut, from its shape and the GPU's numbers alone: plain C++, which tests run without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace localllm::cuda {

constexpr int LOG_THREADS = 9, THREADS = 1 << LOG_THREADS, WARPS = THREADS / 32, MAX_SLOTS = 12;
constexpr int HELD = 4;  // vectors of 8 activations that a thread makes ready
constexpr int OWN_LIMIT = 32 << 10;  // bytes of activations that every block may make ready for itself
constexpr int BUDGET = 110 << 10;    // bytes of shared memory: the next kernel's begin while this one's still run
constexpr int STATIC = 1 << 10;      // bytes of shared memory that kernels and the driver take beside what a plan has

// What a plan needs to know of a format (formats.cuh).
struct Traits {
  int x_bytes, pieces, chunk, records;
  bool rounded_in_groups;

  // Its activations take the registers of larger tiles.
  constexpr bool heavy() const { return pieces * x_bytes == 8; }
  // Whether tiles of 4 blocks of outputs, and steps of several chunks, are compiled: small groups are rare.
  constexpr bool many_tiles() const { return records <= 1 && !heavy(); }
  // Chunks of a warp's step in tiles of one block of outputs.
  constexpr int depth(int nt) const { return many_tiles() && nt == 1 && pieces < 4 ? 2 : 1; }
};

struct Shape {
  int rows, outs, subs, group;
  int64_t row_bytes;
  bool gated;
};

struct Limits {
  int processors, shared;  // bytes of shared memory that a block may ask for
};

// How one kernel computes some rows: tiles of 8 * j outputs, p chunks of a warp's step, nt groups of 8 rows.
struct Cut {
  int j, p, nt, slots, slot_bytes, tables, shared;

  bool fits() const { return slots >= 2; }
};

// Bytes of a row of activations that every block makes ready for itself; 0: they are read as they are needed.
constexpr int own_pitch(const Traits& f, const Shape& a) {
  const int64_t chunks = (a.row_bytes + 63) / 64, pitch = chunks * f.chunk * f.x_bytes + 16;
  const bool groups = !f.rounded_in_groups || a.group == 32 || a.group == 64 || a.group == 128;
  const int rows = a.rows == 1 ? 1 : a.rows == 2 ? 2 : a.rows <= 4 ? 4 : 8;
  const bool held = chunks * f.chunk <= HELD * 8 * THREADS / rows;
  return a.rows <= 8 && groups && held && a.rows * pitch <= OWN_LIMIT ? int(pitch) : 0;
}

// Blocks of 8 outputs to a tile, 4, 2 or 1: as many as leave no more than a tenth of the multiprocessors without work.
inline int outputs_of_tile(int64_t blocks, bool gated, int processors) {
  auto busy = [&](int64_t each) {
    int64_t tiles = (blocks + each - 1) / each, turns = (tiles + processors - 1) / processors;
    return double(blocks) / double(turns * processors * each);
  };
  double best = std::max({busy(4), busy(2), gated ? 0.0 : busy(1)});
  if (busy(4) >= 0.9 * best) return 4;
  return busy(2) >= 0.9 * best || gated ? 2 : 1;
}

// The room of tiles of 8 * j outputs, with two tables of sums where both are small and fit.
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

// The best tiles that fit; otherwise some that do not. Gates and what they gate are in one tile.
inline Cut cut_of(const Traits& f, const Shape& a, int pitch, const Limits& gpu) {
  const int each = outputs_of_tile((a.outs + 7) / 8, a.gated, gpu.processors), depth = f.depth(a.rows <= 8 ? 1 : 2);
  Cut cut{};
  auto tried = [&](int j, int p) { return (cut = cut_of(f, a, pitch, gpu.shared, j, p)).fits(); };
  if (f.many_tiles() && each == 4 && tried(4, 1)) return cut;
  if (f.many_tiles() && each == 1 && tried(1, depth)) return cut;
  if (!tried(2, 1) && !a.gated) tried(1, depth);
  return cut;
}

// Rows that are computed together: all, or half of them where the whole do not fit; the weights are read anew for each
// half. 0: not even these fit. Where every block makes activations ready, it does so for either half.
inline int rows_at_once(const Traits& f, const Shape& a, int pitch, const Limits& gpu) {
  if (cut_of(f, a, pitch, gpu).fits()) return a.rows;
  Shape half = a;
  half.rows = (a.rows + 1) / 2;
  return half.rows < a.rows && cut_of(f, half, pitch, gpu).fits() ? half.rows : 0;
}

// Whether a product is computed; with a norm, every block makes its activations ready.
inline bool fits(const Traits& f, const Shape& a, bool normed, const Limits& gpu) {
  const int pitch = own_pitch(f, a);
  return (pitch || !normed) && rows_at_once(f, a, pitch, gpu) > 0;
}

// What of it depends on groups: inputs that a record is of, chunks of these, and records of an output.
struct Subs {
  int per_sub, subs;
};
constexpr Subs subs_of(const Traits& f, int64_t ins, int64_t group) {
  const int64_t sub = f.chunk == 128 ? 128 / std::max(f.records, 1) : std::min(group, ins);
  return {int((sub + f.chunk - 1) / f.chunk), int((ins + sub - 1) / sub)};
}

// The formats of weights (linear.h), by what a plan needs to know of them.
constexpr Traits BF16{2, 1, 32, 0, false}, WHOLE8{1, 2, 64, 0, false};
constexpr Traits e4m3(bool grouped) { return {2, 2, 64, grouped, false}; }
constexpr Traits nibbles(bool wide, int per_chunk) { return {wide ? 2 : 1, 4, 128, per_chunk, !wide}; }

}  // namespace localllm::cuda
