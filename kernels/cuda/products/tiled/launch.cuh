// Converts ProductArgs to the arguments of the tiled kernel in one weight format, and starts it.
#pragma once

#include "../product.h"
#include "hopper.cuh"
#include "plan.h"

namespace localllm::cuda {

// The bytes of scratch memory, in the order of the fields.
struct TiledMemory {
  int64_t partials, x, scales;

  int64_t bytes() const { return partials + x + scales; }
};

template <class F>
static inline Tiled tiled_arguments(const ProductArgs& args) {
  Tiled a{};
  a.out = args.out;
  a.x = args.x;
  a.weight = static_cast<const uint8_t*>(args.weight);
  a.records = static_cast<const uint32_t*>(args.records);
  a.scale = args.scale;
  a.bias = args.bias;
  a.out_type = args.out_type;
  a.bias_type = args.bias_type;
  a.rows = int(args.rows);
  a.out_features = int(args.out_features);
  a.in_features = int(args.in_features);
  a.row_pitch = int(round_up(args.rows, 4));
  a.row_bytes = args.row_bytes;
  a.x_stride = args.x_stride;
  a.out_stride = args.out_stride;
  a.resident = args.resident;
  a.chunks = int((args.in_features + 127) / 128);
  const bool int4 = F::WEIGHT_BYTES == 64;
  const int64_t subgroup = int4 ? 128 / F::RECORDS : std::min(args.group, args.in_features);
  a.subgroups = F::RECORDS ? int((args.in_features + subgroup - 1) / subgroup) : 1;
  a.records_per_subgroup = int4 ? 1 : int((subgroup + 63) / 64);
  return a;
}

// Blocks of a kernel that run at the same time on the current device. `per_processor`: cached blocks per multiprocessor
// of each device.
template <class Kernel>
static inline int resident_blocks(Kernel kernel, int threads, int shared, int (&per_processor)[64]) {
  int device = 0;
  cudaGetDevice(&device);
  int& blocks = per_processor[device % 64];
  if (!blocks) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared);
    check_launch("tiled_product");
    if (!blocks) throw std::runtime_error("tiled_product: this GPU has too little shared memory");
  }
  return blocks * gpu().processors;
}

// The tiled kernel with mma.sync.
template <class F, int M, int N, int WARPS_M, int WARPS_N, int MIN_BLOCKS>
struct TiledKernel {
  static constexpr int SLOTS = std::min(MAX_TILED_SLOTS, TILED_SHARED / TileShape<F, M, N, WARPS_M, WARPS_N, 1>::SLOT);
  static_assert(SLOTS >= 2);
  using Shape = TileShape<F, M, N, WARPS_M, WARPS_N, SLOTS>;
  static constexpr int SUM_COST = 0;  // not measured: all blocks get the same number of chunks

  static int resident() {
    static int per_processor[64];
    return resident_blocks(tiled<Shape, MIN_BLOCKS>, Shape::THREADS, Shape::SHARED, per_processor);
  }
  static void start(const Tiled& a, int blocks, cudaStream_t stream) {
    launch_early(tiled<Shape, MIN_BLOCKS>, blocks, Shape::THREADS, Shape::SHARED, stream, a);
  }
};

// The tiled kernel of Hopper for 8 * N rows per tile.
template <class F, int N>
struct HopperKernel {
  using Shape = HopperShape<F, N>;
  static constexpr int THREADS = 3 * Shape::WARPGROUP, SUM_COST = Shape::SUM_COST;

  static int resident() {
    static int per_processor[64];
    return resident_blocks(tiled_hopper<Shape>, THREADS, Shape::SHARED, per_processor);
  }
  // The tensor map of a matrix of bytes, for boxes of `columns` bytes and `rows` rows.
  static CUtensorMap matrix_map(const void* from, int64_t rows, int64_t pitch, int box_columns, int box_rows,
                                CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    return tensor_map<3>("tiled_product", CU_TENSOR_MAP_DATA_TYPE_UINT8, from, {cuuint64_t(pitch), cuuint64_t(rows), 1},
                         {cuuint64_t(pitch), cuuint64_t(pitch * rows)}, {cuuint32_t(box_columns), cuuint32_t(box_rows), 1},
                         swizzle);
  }
  static void start(const Tiled& a, int blocks, cudaStream_t stream) {
    HopperMaps maps{};
    maps.x = matrix_map(a.x, a.rows, a.x_stride * F::X_BYTES, 128, Shape::ROWS);
    const auto swizzle = Shape::WEIGHT_BYTES == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                         : Shape::PARTS == 2       ? CU_TENSOR_MAP_SWIZZLE_64B
                                                   : CU_TENSOR_MAP_SWIZZLE_NONE;
    maps.weight = matrix_map(a.weight, a.out_features, a.row_bytes, Shape::WEIGHT_BYTES, Shape::OUTPUTS, swizzle);
    if (F::RECORDS > 0) {
      const cuuint64_t block_bytes = cuuint64_t(a.subgroups) * 32;
      maps.records = tensor_map<3>("tiled_product", CU_TENSOR_MAP_DATA_TYPE_INT32, a.records,
                                   {8, cuuint64_t(a.subgroups), cuuint64_t(a.out_features + 7) / 8}, {32, block_bytes},
                                   {8, cuuint32_t(Shape::RECORDS_AT_ONCE ? F::RECORDS : 1), Shape::OUTPUTS / 8},
                                   CU_TENSOR_MAP_SWIZZLE_NONE);
    }
    if (F::ROUNDED_IN_GROUPS) {
      const cuuint64_t pitch = cuuint64_t(a.row_pitch) * 4;
      maps.row_scales = tensor_map<3>("tiled_product", CU_TENSOR_MAP_DATA_TYPE_FLOAT32, a.row_scale,
                                      {cuuint64_t(a.row_pitch), cuuint64_t(a.subgroups), 1}, {pitch, pitch * a.subgroups},
                                      {Shape::ROWS, F::RECORDS, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
    }
    launch_clusters(tiled_hopper<Shape>, a.split, blocks, THREADS, Shape::SHARED, stream, maps, a);
  }
};

// Sets the tiles of a product, and returns its blocks.
template <class Kernel>
static inline TiledBlocks set_tiles(Tiled& a) {
  using Shape = typename Kernel::Shape;
  a.row_tiles = (a.rows + Shape::ROWS - 1) / Shape::ROWS;
  a.tiles = a.row_tiles * ((a.out_features + Shape::OUTPUTS - 1) / Shape::OUTPUTS);
  const TiledBlocks blocks =
      blocks_of_product(a.tiles, a.chunks, Kernel::resident(), Kernel::SUM_COST, Kernel::SUM_COST > 0);
  a.sharers = blocks.sharers;
  a.split = blocks.split;
  return blocks;
}

// `arranged`: the kernel reads prepared activations; else it reads ProductArgs.x.
template <class Kernel>
static inline TiledMemory memory_of(Tiled a, bool arranged) {
  using F = typename Kernel::Shape::Format;
  const TiledBlocks blocks = set_tiles<Kernel>(a);
  TiledMemory memory{};
  if (blocks.split == 1) memory.partials = 2 * int64_t(blocks.sharers) * Kernel::Shape::PARTIAL * 4;
  if (arranged) memory.x = int64_t(a.rows) * a.chunks * 128 * F::X_BYTES;
  if (F::ROUNDED) memory.scales = int64_t(a.row_pitch) * (F::ROUNDED_IN_GROUPS ? a.subgroups : 1) * 4;
  return memory;
}

// Prepares activations in `order` if `arranged`, and starts the kernel.
template <class Kernel>
static inline void start_product(const ProductArgs& args, bool arranged, InputOrder order, int32_t* arrivals,
                                 cudaStream_t stream) {
  using F = typename Kernel::Shape::Format;
  Tiled a = tiled_arguments<F>(args);
  const TiledBlocks blocks = set_tiles<Kernel>(a);
  const TiledMemory memory = memory_of<Kernel>(a, arranged);
  a.partials = static_cast<float*>(args.shared);
  a.arrivals = arrivals;
  if (arranged) {
    char* x = static_cast<char*>(args.shared) + memory.partials;
    auto* scales = F::ROUNDED ? reinterpret_cast<float*>(x + memory.x) : nullptr;
    a.x = x;
    a.x_stride = int64_t(a.chunks) * 128;
    a.row_scale = scales;
    RowArgs rows{x, scales, args.x, args.rows, args.in_features, a.x_stride, args.x_stride};
    rows.order = order;
    rows.e4m3 = std::is_same_v<F, HopperFp8>;
    rows.group = args.format == Weights::int4 ? args.group : args.in_features;
    rows.subgroup = F::ROUNDED_IN_GROUPS ? 128 / std::max(F::RECORDS, 1) : 0;
    rows.scale_pitch = F::ROUNDED_IN_GROUPS ? a.row_pitch : 0;
    const bool rounded = F::ROUNDED || args.format == Weights::int4;
    rounded ? round_rows(rows, stream) : arrange_rows(rows, stream);
  }
  Kernel::start(a, blocks.blocks, stream);
  check_launch("tiled_product");
}

}  // namespace localllm::cuda
