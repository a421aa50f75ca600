// Prefill attention, the producer warp: claims tiles and copies queries, keys and values to shared memory. Hopper only.
#pragma once

#include "attention_extend_tile.cuh"

namespace localllm::cuda {
namespace {

using namespace hopper;

// Maps the index of a work unit to its tile. The warp calls find() with ascending indices.
struct TileScheduler {
  const ExtendArgs& args;
  int each;  // queries per tile
  int base = 0, passed = 0;  // first row of the current group of 32 rows, and the tiles of the rows before it

  __device__ Tile find(int64_t unit, int lane) {
    int kv_head = int(unit % args.kv_heads);
    int64_t wanted = unit / args.kv_heads;
    for (; base < args.rows; base += 32) {
      int start = 0, queries = 0, own = 0;
      if (base + lane < args.rows) {
        start = args.row_starts[base + lane];
        queries = args.row_starts[base + lane + 1] - start;
        own = queries >= args.fewest ? (queries + each - 1) / each : 0;
      }
      int upto = own;
      for (int distance = 1; distance < 32; distance *= 2) {
        int other = __shfl_up_sync(ALL, upto, distance);
        if (lane >= distance) upto += other;
      }
      unsigned here = __ballot_sync(ALL, passed + upto > wanted);
      if (here) {
        int found = __ffs(here) - 1;
        int index = passed + upto - 1 - int(wanted);  // the last tile of a row has index 0
        int first = __shfl_sync(ALL, index, found) * each;
        return cut(base + found, __shfl_sync(ALL, start, found), __shfl_sync(ALL, queries, found), first, kv_head);
      }
      passed += __shfl_sync(ALL, upto, 31);
    }
    return {};
  }

  __device__ Tile cut(int row, int start, int queries, int first, int kv_head) {
    Tile tile;
    tile.row = row, tile.kv_head = kv_head;
    tile.token = start + first, tile.count = min(queries - first, each);
    tile.context = args.context_lens[row];
    tile.before = max(tile.context - queries, 0) + first;
    tile.high = (tile.before + tile.count - 1) / BLOCK;
    tile.low = args.window > 0 ? max(tile.before - args.window + 1, 0) / BLOCK : 0;
    return tile;
  }
};

// The loop of the producer warp.
template <class T, int DIM>
struct Producer {
  const ExtendArgs& args;
  const Maps& maps;
  Shared<T, DIM>& shared;
  int lane, unit, units;  // unit: positions per TMA copy, at most a page or BLOCK; units: copies per BLOCK positions
  Ring<STAGES> keys{}, values{};

  // The group of 8 slots where this lane's copy of a block of positions starts. Positions behind the context get the
  // index behind the last group; TMA fills them with zeros.
  __device__ int slot_group_of(const Tile& tile, int block) const {
    int position = block * BLOCK + lane * unit, column = position / args.page_size;
    if (lane >= units || position >= tile.context || column >= args.columns) return args.slots / 8;
    int page = args.page_table[tile.row * args.table_row + column];
    return int((int64_t(page) * args.page_size + position % args.page_size) / 8);
  }

  __device__ void copy_block(const CUtensorMap& map, T* to, uint64_t& full, uint64_t& empty, int parity,
                             int kv_head, int slot_group) const {
    wait_barrier(empty, parity ^ 1);
    if (lane == 0) arrive_expecting(full, Shared<T, DIM>::BYTES);
    if (lane < units) copy_box(to + lane * unit * DIM, map, full, 0, 0, 0, kv_head, slot_group);
    __syncwarp();
  }
  __device__ void copy_keys(const Tile& tile, int slot_group) {
    copy_block(maps.keys, shared.keys[keys.at], shared.keys_full[keys.at], shared.keys_empty[keys.at], keys.parity,
               tile.kv_head, slot_group);
    keys.next();
  }
  __device__ void copy_values(const Tile& tile, int slot_group) {
    copy_block(maps.values, shared.values[values.at], shared.values_full[values.at], shared.values_empty[values.at],
               values.parity, tile.kv_head, slot_group);
    values.next();
  }

  __device__ void copy_query(const Tile& tile, Ring<2> ring, int each) const {
    wait_barrier(shared.query_empty[ring.at], ring.parity ^ 1);
    if (lane == 0) {
      write_tile(shared.tiles[ring.at], tile);
      uint64_t& full = shared.query_full[ring.at];
      if (tile.count) {
        arrive_expecting(full, each * args.group * DIM * 2);
        for (int half = 0; half < DIM / 64; half++)
          copy_box(shared.query[ring.at] + half * TILE_ROWS * 64, maps.query, full, half * 64,
                   tile.kv_head * args.group, tile.token);
      } else {
        arrive(full);
      }
    }
    __syncwarp();
  }

  __device__ void run() {
    int each = TILE_ROWS / args.group;
    TileScheduler scheduler{args, each};
    Ring<2> queries;
    int64_t wanted = blockIdx.x;
    for (;; queries.next()) {
      Tile tile = scheduler.find(wanted, lane);
      int slot_group = tile.count ? slot_group_of(tile, tile.high) : 0, claim = 0;
      if (lane == 0 && tile.count) claim = atomicAdd(&args.claims[0], 1);
      copy_query(tile, queries, each);
      if (!tile.count) break;
      for (int block = tile.high;; block--) {
        int next = block > tile.low ? slot_group_of(tile, block - 1) : 0;
        if (block == tile.high) copy_keys(tile, slot_group);
        if (block > tile.low) copy_keys(tile, next);
        copy_values(tile, slot_group);
        if (block == tile.low) break;
        slot_group = next;
      }
      wanted = int64_t(gridDim.x) + __shfl_sync(ALL, claim, 0);
    }
    if (lane == 0) {  // the last thread block resets the counters
      __threadfence();
      if (atomicAdd(&args.claims[1], 1) == (int)gridDim.x - 1) args.claims[0] = 0, args.claims[1] = 0;
    }
  }
};

}  // namespace
}  // namespace localllm::cuda
