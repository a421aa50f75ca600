// Prefill attention, the producer warp: claims tiles and copies queries, keys and values to shared memory. Hopper only.
#pragma once

#include "prefill_tile.cuh"

namespace localllm::cuda {
namespace {

using namespace hopper;

// Maps the index of a work unit to its tile. The warp calls find() with ascending indices.
struct TileScheduler {
  const PrefillArgs& args;
  int queries_per_tile;
  int base = 0, tiles_before = 0;  // first row of the current group of 32 rows, and the tiles of the rows before it

  __device__ Tile find(int64_t unit, int lane) {
    int kv_head = int(unit % args.kv_heads);
    int64_t target = unit / args.kv_heads;
    for (; base < args.rows; base += 32) {
      int start = 0, queries = 0, tiles = 0;
      if (base + lane < args.rows) {
        start = args.row_starts[base + lane];
        queries = args.row_starts[base + lane + 1] - start;
        tiles = queries >= args.min_queries ? (queries + queries_per_tile - 1) / queries_per_tile : 0;
      }
      int end = tiles;
      for (int distance = 1; distance < 32; distance *= 2) {
        int other = __shfl_up_sync(ALL, end, distance);
        if (lane >= distance) end += other;
      }
      unsigned containing = __ballot_sync(ALL, tiles_before + end > target);
      if (containing) {
        int row_lane = __ffs(containing) - 1;
        int tile_index = tiles_before + end - 1 - int(target);  // the last tile of a row has index 0
        int first = __shfl_sync(ALL, tile_index, row_lane) * queries_per_tile;
        return make_tile(base + row_lane, __shfl_sync(ALL, start, row_lane), __shfl_sync(ALL, queries, row_lane), first,
                         kv_head);
      }
      tiles_before += __shfl_sync(ALL, end, 31);
    }
    return {};
  }

  __device__ Tile make_tile(int row, int start, int queries, int first, int kv_head) {
    Tile tile;
    tile.row = row;
    tile.kv_head = kv_head;
    tile.token = start + first;
    tile.count = min(queries - first, queries_per_tile);
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
  const PrefillArgs& args;
  const Maps& maps;
  Shared<T, DIM>& shared;
  int lane, unit, units;  // unit: positions per TMA copy, at most a page or BLOCK; units: copies per BLOCK positions
  Ring<STAGES> keys{}, values{};

  // The group of 8 slots where this lane's copy of a block of positions starts. Positions after the end of the context
  // get the index after the last group; TMA fills them with zeros.
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
    copy_block(maps.keys, shared.keys[keys.index], shared.keys_full[keys.index], shared.keys_empty[keys.index],
               keys.parity, tile.kv_head, slot_group);
    keys.next();
  }
  __device__ void copy_values(const Tile& tile, int slot_group) {
    copy_block(maps.values, shared.values[values.index], shared.values_full[values.index],
               shared.values_empty[values.index], values.parity, tile.kv_head, slot_group);
    values.next();
  }

  __device__ void copy_query(const Tile& tile, Ring<2> ring, int queries_per_tile) const {
    wait_barrier(shared.query_empty[ring.index], ring.parity ^ 1);
    if (lane == 0) {
      write_tile(shared.tiles[ring.index], tile);
      uint64_t& full = shared.query_full[ring.index];
      if (tile.count) {
        arrive_expecting(full, queries_per_tile * args.group * DIM * 2);
        for (int half = 0; half < DIM / 64; half++)
          copy_box(shared.query[ring.index] + half * TILE_ROWS * 64, maps.query, full, half * 64,
                   tile.kv_head * args.group, tile.token);
      } else {
        arrive(full);
      }
    }
    __syncwarp();
  }

  __device__ void run() {
    int queries_per_tile = TILE_ROWS / args.group;
    TileScheduler scheduler{args, queries_per_tile};
    Ring<2> queries;
    int64_t target = blockIdx.x;
    for (;; queries.next()) {
      Tile tile = scheduler.find(target, lane);
      int slot_group = tile.count ? slot_group_of(tile, tile.high) : 0, claim = 0;
      if (lane == 0 && tile.count) claim = atomicAdd(&args.claims[0], 1);
      copy_query(tile, queries, queries_per_tile);
      if (!tile.count) break;
      for (int block = tile.high;; block--) {
        int next = block > tile.low ? slot_group_of(tile, block - 1) : 0;
        if (block == tile.high) copy_keys(tile, slot_group);
        if (block > tile.low) copy_keys(tile, next);
        copy_values(tile, slot_group);
        if (block == tile.low) break;
        slot_group = next;
      }
      target = int64_t(gridDim.x) + __shfl_sync(ALL, claim, 0);
    }
    if (lane == 0) {  // the last thread block resets the counters
      __threadfence();
      if (atomicAdd(&args.claims[1], 1) == (int)gridDim.x - 1) {
        args.claims[0] = 0;
        args.claims[1] = 0;
      }
    }
  }
};

}  // namespace
}  // namespace localllm::cuda
