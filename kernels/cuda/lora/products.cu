// LoRA products of decode steps. The shrink kernel computes inner = scale * A x, the expand kernel adds B inner.
//
// Both kernels start before the kernel ahead has ended: they read the tiles and the first factors, and then wait for
// their inputs. A block computes one work item after the other. The captured number of tiles is a limit, so the blocks
// count the tiles in use.
//
// The tensor cores compute 16 tokens of one adapter at a time (bf16). A warp reads each factor once, in the layout of
// operand B of mma.sync, and the tokens are operand A. Both operands use the same permutation of the inputs, so a lane
// reads adjacent inputs and needs no shuffle. Other dtypes and unaligned factors have kernels without tiles.
#include <algorithm>

#include "products.h"
#include "../device/mma.cuh"
#include "../device/overlap.cuh"

namespace localllm::cuda {

namespace {

using bf16 = __nv_bfloat16;

constexpr int LORA_WARPS = 4, LORA_THREADS = 32 * LORA_WARPS;
constexpr int TOKENS = 16;             // tokens of an item: the rows of mma.sync
constexpr int COLUMNS = 16;            // inner products of a token in an item of the shrink kernel
static_assert(TOKENS * COLUMNS == 2 * LORA_THREADS, "a thread stores two inner products of an item");
constexpr int VECTORS = 4;             // vectors of 32 inputs that a warp reads at once
constexpr int OUTPUTS = 64;            // outputs of a warp in an item of the expand kernel
constexpr int BLOCK_OUTPUTS = OUTPUTS * LORA_WARPS;
constexpr int MAX_RANK = 512;          // limit of the ranks in shared memory
constexpr int BLOCKS_PER_PROCESSOR = 4;

__host__ __device__ inline int divide_up(int64_t a, int64_t b) { return int((a + b - 1) / b); }

// Number of inputs of a share; a multiple of 8.
__host__ __device__ inline int share_inputs(const LoraStep& step) {
  return divide_up(divide_up(step.args.in_features, step.shares), 8) * 8;
}

// Up to 16 tokens of one adapter.
struct TokenGroup {
  int first, end, slot;  // tokens order[first] … order[end - 1]

  __device__ TokenGroup(const LoraStep& step, int index) {
    const int groups = divide_up(step.chunk, TOKENS), tile = index / groups;
    first = step.args.starts[tile] + index % groups * TOKENS;
    end = min(step.args.starts[tile + 1], first + TOKENS);
    slot = step.args.tile_slots[tile];
    if (slot <= 0 || slot >= step.slot_count) end = first;
  }
  // The index of a token; -1: there is none.
  __device__ int token(const LoraStep& step, int row) const {
    if (first + row >= end) return -1;
    const int token = step.args.order[first + row];
    return token >= 0 && token < step.tokens ? token : -1;
  }
};

// Waits before the end of a block. The kernel behind waits until all blocks have ended, and the kernels ahead must have
// ended by then: one block is enough. Other blocks without work end early and make room for the kernel behind.
__device__ inline void wait_before_end(bool has_items) {
  if (has_items || blockIdx.x == 0) wait_for_previous();
}

// The number of groups of tokens in use. Every warp counts.
__device__ inline int used_groups(const LoraStep& step) {
  const int32_t* starts = step.args.starts;
  const int tiles = int(step.args.tiles), lane = int(threadIdx.x) % 32, end = starts[tiles];
  int used = 0;
  for (int first = 0; first < tiles; first += 32)
    used += __popc(__ballot_sync(0xffffffffu, first + lane < tiles && starts[first + lane] < end));
  return used * divide_up(step.chunk, TOKENS);
}

__device__ inline uint4 read_vector(const bf16* from, bool exists) {
  return exists ? *reinterpret_cast<const uint4*>(from) : uint4{};
}

// Grid: any number of blocks. An item is a group of tokens, 16 inner products and a share of the inputs.
__global__ void __launch_bounds__(LORA_THREADS, BLOCKS_PER_PROCESSOR) shrink_tiles(const __grid_constant__ LoraStep step) {
  launch_dependents();
  __shared__ float partial[LORA_WARPS][TOKENS][COLUMNS + 4];
  const LoraArgs& args = step.args;
  const int warp = int(threadIdx.x) / 32, g = int(threadIdx.x) % 32 / 4, t = int(threadIdx.x) % 4;
  const int64_t in_features = args.in_features;
  const int width = int(args.slices * args.rank), column_groups = divide_up(width, COLUMNS);
  const int inputs = share_inputs(step), item_count = used_groups(step) * column_groups * step.shares;
  for (int item = int(blockIdx.x); item < item_count; item += int(gridDim.x)) {
    const int share = item % step.shares, first_column = item / step.shares % column_groups * COLUMNS;
    const TokenGroup group(step, item / step.shares / column_groups);
    if (group.first >= group.end) continue;
    const int tokens[2] = {group.token(step, g), group.token(step, g + 8)};
    const bf16* factors = static_cast<const bf16*>(args.a) + group.slot * args.a_stride +
                          (first_column + g) * in_features + 8 * t;
    const int stop = int(min(in_features, int64_t(share + 1) * inputs));
    // This thread stores the product of one column and of two tokens. It reads the tokens early, to hide the latency.
    const int row = int(threadIdx.x) / COLUMNS, column = int(threadIdx.x) % COLUMNS;
    const int targets[2] = {group.token(step, row), group.token(step, row + TOKENS / 2)};
    const float scales[2] = {args.scales[max(targets[0], 0)], args.scales[max(targets[1], 0)]};
    float sums[COLUMNS / 8][4] = {};
    for (int base = share * inputs + warp * 32 * VECTORS; base < stop; base += LORA_WARPS * 32 * VECTORS) {
      uint4 w[VECTORS][COLUMNS / 8], x[VECTORS][2];
#pragma unroll
      for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
          w[v][j] = read_vector(factors + 8 * j * in_features + base + 32 * v,
                                base + 32 * v + 8 * t < stop && first_column + 8 * j + g < width);
      wait_for_previous();
#pragma unroll
      for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          x[v][h] = read_vector(static_cast<const bf16*>(args.x) + max(tokens[h], 0) * args.x_stride + base + 32 * v +
                                    8 * t,
                                base + 32 * v + 8 * t < stop && tokens[h] >= 0);
#pragma unroll
      for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
          multiply_add(sums[j], x[v][0].x, x[v][1].x, x[v][0].y, x[v][1].y, w[v][j].x, w[v][j].y);
          multiply_add(sums[j], x[v][0].z, x[v][1].z, x[v][0].w, x[v][1].w, w[v][j].z, w[v][j].w);
        }
    }
    wait_for_previous();  // earlier kernels may read `inner`
    __syncthreads();      // the sums of the previous item have been read
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) partial[warp][g + i / 2 * 8][8 * j + 2 * t + i % 2] = sums[j][i];
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (targets[h] < 0 || first_column + column >= width) continue;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < LORA_WARPS; w++) sum += partial[w][row + h * (TOKENS / 2)][column];
      args.inner[(int64_t(share) * step.tokens + targets[h]) * width + first_column + column] = sum * scales[h];
    }
  }
  wait_before_end(int(blockIdx.x) < item_count);
}

// The outputs of one block: up to BLOCK_OUTPUTS outputs of one slice.
struct OutputBlock {
  int slice, offset;  // offset: the first output in the slice
  int64_t begin;      // the first output of the slice in the projection

  __device__ OutputBlock(const LoraArgs& args, int index) : slice(0), begin(0) {
    for (; slice + 1 < args.slices; slice++) {
      const int blocks = divide_up(args.widths[slice], BLOCK_OUTPUTS);
      if (index < blocks) break;
      index -= blocks;
      begin += args.widths[slice];
    }
    offset = index * BLOCK_OUTPUTS;
  }
};

__host__ __device__ inline int output_blocks(const LoraArgs& args) {
  int blocks = 0;
  for (int slice = 0; slice < args.slices; slice++) blocks += divide_up(args.widths[slice], BLOCK_OUTPUTS);
  return blocks;
}

// The bf16 of two numbers in one register, and the bf16 of their rounding errors: together they have 16 bits of each
// number.
__device__ inline void split(float first, float second, uint32_t& high, uint32_t& low) {
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(first, second);
  const __nv_bfloat162 rest =
      __floats2bfloat162_rn(first - __low2float(rounded), second - __high2float(rounded));
  high = *reinterpret_cast<const uint32_t*>(&rounded);
  low = *reinterpret_cast<const uint32_t*>(&rest);
}

template <class T>
__device__ inline void write_outputs(T* to, const float (&delta)[4], bool adds) {
  float values[4] = {};
  if (adds) load<4>(to, values);
#pragma unroll
  for (int i = 0; i < 4; i++) values[i] += delta[i];
  save<4>(to, values);
}

// Writes zeros to outputs of up to 16 tokens, for tokens that have no adapter.
template <class T>
__device__ inline void clear_outputs(const LoraStep& step, const OutputBlock& block, int first) {
  const LoraArgs& args = step.args;
  for (int e = int(threadIdx.x); e < TOKENS * BLOCK_OUTPUTS / 4; e += LORA_THREADS) {
    const int64_t token = first + e / (BLOCK_OUTPUTS / 4);
    const int offset = block.offset + e % (BLOCK_OUTPUTS / 4) * 4;
    if (token >= step.tokens || offset >= args.widths[block.slice] || step.slots[token] > 0) continue;
    const float zeros[4] = {};
    save<4>(static_cast<T*>(args.out) + token * args.out_stride + block.begin + offset, zeros);
  }
}

// An item of the expand kernel: a group of tokens and a block of outputs.
struct ExpandItem {
  int group_index;
  TokenGroup group;
  OutputBlock block;
  const bf16* factors;  // of this warp's first output, at the first ranks of this lane
  int outputs;          // outputs that begin with this warp's first one; 0 or less: none

  __device__ ExpandItem(const LoraStep& step, int index, int blocks, int warp, int t)
      : group_index(index / blocks), group(step, group_index), block(step.args, index % blocks) {
    set_factors(step.args, warp, t);
  }
  __device__ void advance(const LoraStep& step, int index, int blocks, int warp, int t) {
    if (index / blocks != group_index) {
      group_index = index / blocks;
      group = TokenGroup(step, group_index);
    }
    block = OutputBlock(step.args, index % blocks);
    set_factors(step.args, warp, t);
  }
  __device__ bool shares_inner(const ExpandItem& other) const {
    return group_index == other.group_index && block.slice == other.block.slice;
  }
  // Reads the factors of the ranks k … k + 15. Two blocks of 8 outputs interleave, so that a lane gets four adjacent
  // outputs.
  __device__ void read(uint2 (&w)[OUTPUTS / 8], int rank, int k, int g, int t) const {
#pragma unroll
    for (int j = 0; j < OUTPUTS / 8; j++) {
      const int output = j / 2 * 16 + g / 2 * 4 + j % 2 * 2 + g % 2;
      const bool exists = group.first < group.end && output < outputs && k + 4 * t < rank;
      w[j] = exists ? *reinterpret_cast<const uint2*>(factors + output * rank + k) : uint2{};
    }
  }

 private:
  __device__ void set_factors(const LoraArgs& args, int warp, int t) {
    const int first = block.offset + warp * OUTPUTS;
    outputs = int(args.widths[block.slice]) - first;
    factors = static_cast<const bf16*>(args.b) + group.slot * args.b_stride + (block.begin + first) * args.rank + 4 * t;
  }
};

// Adds up the shares of the inner products of a group and a slice. Result: inner [TOKENS][pitch].
__device__ inline void sum_shares(const LoraStep& step, const TokenGroup& group, int slice, float* inner, int pitch) {
  const LoraArgs& args = step.args;
  const int vectors = int(args.rank) / 4;
  const int64_t stride = step.tokens * args.slices * args.rank;
  for (int e = int(threadIdx.x); e < TOKENS * vectors; e += LORA_THREADS) {
    const int row = e / vectors, offset = e % vectors * 4, token = group.token(step, row);
    const float* from = args.inner + (max(token, 0) * args.slices + slice) * args.rank + offset;
    float4 total{};
#pragma unroll 4
    for (int share = 0; share < (token < 0 ? 0 : step.shares); share++) {
      const float4 part = *reinterpret_cast<const float4*>(from + share * stride);
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    *reinterpret_cast<float4*>(inner + row * pitch + offset) = total;
  }
}

// Grid: any number of blocks; shared memory: inner products [TOKENS][rank + 4]. A block computes adjacent items, which
// share the inner products. It reads the factors of the next item while it computes an item.
template <class T>
__global__ void __launch_bounds__(LORA_THREADS, BLOCKS_PER_PROCESSOR)
    expand_tiles(const __grid_constant__ LoraStep step) {
  launch_dependents();
  extern __shared__ float4 memory[];
  float* inner = reinterpret_cast<float*>(memory);
  const LoraArgs& args = step.args;
  const int warp = int(threadIdx.x) / 32, g = int(threadIdx.x) % 32 / 4, t = int(threadIdx.x) % 4;
  const int rank = int(args.rank), pitch = rank + 4, blocks = output_blocks(args);
  const int items = used_groups(step) * blocks;
  const int begin = int(int64_t(items) * blockIdx.x / gridDim.x);
  const int end = int(int64_t(items) * (blockIdx.x + 1) / gridDim.x);
  if (begin < end) {
    ExpandItem item(step, begin, blocks, warp, t);
    uint2 w[OUTPUTS / 8];
    item.read(w, rank, 0, g, t);
    bool has_inner = false;
    for (int index = begin; index < end; index++) {
      if (!has_inner) {
        wait_for_previous();
        __syncthreads();  // the inner products of the previous item have been read
        sum_shares(step, item.group, item.block.slice, inner, pitch);
        __syncthreads();
      }
      ExpandItem next = item;
      uint2 w_next[OUTPUTS / 8] = {};
      if (index + 1 < end) {
        next.advance(step, index + 1, blocks, warp, t);
        next.read(w_next, rank, 0, g, t);
      }
      float sums[OUTPUTS / 8][4] = {};
      for (int k = 0; k < rank; k += 16) {
        if (k) item.read(w, rank, k, g, t);
        uint32_t high[2][2], low[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float4 x{};
          if (k + 4 * t < rank) x = *reinterpret_cast<const float4*>(inner + (g + 8 * h) * pitch + k + 4 * t);
          split(x.x, x.y, high[h][0], low[h][0]);
          split(x.z, x.w, high[h][1], low[h][1]);
        }
#pragma unroll
        for (int j = 0; j < OUTPUTS / 8; j++) {
          multiply_add(sums[j], low[0][0], low[1][0], low[0][1], low[1][1], w[j].x, w[j].y);
          multiply_add(sums[j], high[0][0], high[1][0], high[0][1], high[1][1], w[j].x, w[j].y);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = item.group.token(step, g + 8 * h);
        if (token < 0) continue;
        T* to = static_cast<T*>(args.out) + token * args.out_stride + item.block.begin + item.block.offset +
                warp * OUTPUTS + 4 * t;
#pragma unroll
        for (int j = 0; j < OUTPUTS / 8; j += 2) {
          if (8 * j + 4 * t >= item.outputs) continue;
          const float delta[4] = {sums[j][2 * h], sums[j][2 * h + 1], sums[j + 1][2 * h], sums[j + 1][2 * h + 1]};
          write_outputs(to + 8 * j, delta, step.adds);
        }
      }
      has_inner = next.shares_inner(item);
      item = next;
#pragma unroll
      for (int j = 0; j < OUTPUTS / 8; j++) w[j] = w_next[j];
    }
  }
  const bool clears = !step.adds && args.starts[args.tiles] < step.tokens;
  wait_before_end(begin < end || clears);
  if (!clears) return;
  for (int index = int(blockIdx.x); index < divide_up(step.tokens, TOKENS) * blocks; index += int(gridDim.x))
    clear_outputs<T>(step, OutputBlock(args, index % blocks), index / blocks * TOKENS);
}

// True if the token has an adapter.
__device__ inline bool adapted(const LoraStep& step, int64_t token) {
  return step.slots[token] > 0 && step.slots[token] < step.slot_count;
}

// For any dtype. A warp computes one inner product of a share of the inputs.
template <class T>
__global__ void __launch_bounds__(LORA_THREADS) shrink_numbers(const __grid_constant__ LoraStep step) {
  launch_dependents();
  wait_for_previous();
  const LoraArgs& args = step.args;
  const int64_t width = args.slices * args.rank;
  const int64_t index = int64_t(blockIdx.x) * LORA_WARPS + threadIdx.x / 32, token = index / width % step.tokens;
  const int64_t share = index / width / step.tokens, inputs = share_inputs(step);
  if (share >= step.shares || !adapted(step, token)) return;
  const T* a = static_cast<const T*>(args.a) + step.slots[token] * args.a_stride + index % width * args.in_features;
  const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
  const int64_t stop = min(args.in_features, (share + 1) * inputs);
  float sum = 0.0f;
  for (int64_t i = share * inputs + threadIdx.x % 32; i < stop; i += 32) sum += to_float(a[i]) * to_float(x[i]);
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) args.inner[index] = sum * args.scales[token];
}

// For any dtype. A thread computes one output.
template <class T, class Out>
__global__ void __launch_bounds__(LORA_THREADS) expand_numbers(const __grid_constant__ LoraStep step, int64_t outputs) {
  launch_dependents();
  wait_for_previous();
  const LoraArgs& args = step.args;
  const int64_t index = int64_t(blockIdx.x) * LORA_THREADS + threadIdx.x, token = index / outputs;
  const int64_t output = index % outputs;
  if (token >= step.tokens) return;
  const bool computes = adapted(step, token);
  if (!computes && step.adds) return;
  int slice = 0;
  for (int64_t end = args.widths[0]; slice + 1 < args.slices && output >= end; end += args.widths[slice]) slice++;
  float sum = 0.0f;
  if (computes) {
    const T* b = static_cast<const T*>(args.b) + step.slots[token] * args.b_stride + output * args.rank;
    for (int64_t k = 0; k < args.rank; k++) {
      const float* inner = args.inner + (token * args.slices + slice) * args.rank + k;
      float total = 0.0f;
      for (int share = 0; share < step.shares; share++) total += inner[share * step.tokens * args.slices * args.rank];
      sum += total * to_float(b[k]);
    }
  }
  Out* to = static_cast<Out*>(args.out) + token * args.out_stride + output;
  from_float(step.adds ? to_float(*to) + sum : sum, to);
}

int64_t total_outputs(const LoraArgs& args) {
  int64_t outputs = 0;
  for (int slice = 0; slice < args.slices; slice++) outputs += args.widths[slice];
  return outputs;
}

int grid_of(int64_t items) {
  return int(std::min<int64_t>(items, int64_t(BLOCKS_PER_PROCESSOR) * gpu().processors));
}

int64_t max_groups(const LoraStep& step) { return step.args.tiles * divide_up(step.chunk, TOKENS); }

bool shrinks_tiles(const LoraArgs& args) {
  return args.type == Type::bf16 && aligned({args.x, args.a}, {args.in_features * 2, args.x_stride * 2, args.a_stride * 2});
}

bool expands_tiles(const LoraArgs& args) {
  int64_t odd = args.rank % 4 | args.out_stride % 4;
  for (int slice = 0; slice < args.slices; slice++) odd |= args.widths[slice] % 4;
  return args.type == Type::bf16 && args.out_type != Type::f16 && !odd && args.rank <= MAX_RANK && args.b_stride % 8 == 0 &&
         aligned({args.out, args.b, args.inner}, {});
}

void check_grid(int64_t blocks, const char* name) {
  if (blocks > MAX_GRID) throw std::runtime_error(std::string(name) + ": too many tokens");
}

}  // namespace

void lora_shrink(const LoraStep& step, cudaStream_t stream) {
  const LoraArgs& args = step.args;
  const int64_t width = args.slices * args.rank;
  if (step.tokens * width * args.tiles == 0) return;
  if (shrinks_tiles(args)) {
    const int blocks = grid_of(max_groups(step) * divide_up(width, COLUMNS) * step.shares);
    launch_early(shrink_tiles, blocks, LORA_THREADS, 0, stream, step);
  } else {
    const int64_t blocks = (step.shares * step.tokens * width + LORA_WARPS - 1) / LORA_WARPS;
    check_grid(blocks, "lora_shrink");
    with_type(args.type, [&](auto t) {
      launch_early(shrink_numbers<decltype(t)>, blocks, LORA_THREADS, 0, stream, step);
    });
  }
  check_launch("lora_shrink");
}

void lora_expand(const LoraStep& step, cudaStream_t stream) {
  const LoraArgs& args = step.args;
  const int64_t outputs = total_outputs(args);
  if (step.tokens * outputs == 0 || (step.adds && args.tiles * args.rank == 0)) return;
  if (expands_tiles(args)) {
    const int64_t groups = max_groups(step) + (step.adds ? 0 : divide_up(step.tokens, TOKENS));
    const int blocks = grid_of(groups * output_blocks(args));
    const size_t shared = TOKENS * (args.rank + 4) * sizeof(float);
    if (args.out_type == Type::f32)
      launch_early(expand_tiles<float>, blocks, LORA_THREADS, shared, stream, step);
    else
      launch_early(expand_tiles<bf16>, blocks, LORA_THREADS, shared, stream, step);
  } else {
    const int64_t blocks = (step.tokens * outputs + LORA_THREADS - 1) / LORA_THREADS;
    check_grid(blocks, "lora_expand");
    with_type(args.type, [&](auto t) {
      with_type(args.out_type, [&](auto out) {
        launch_early(expand_numbers<decltype(t), decltype(out)>, blocks, LORA_THREADS, 0, stream, step, outputs);
      });
    });
  }
  check_launch("lora_expand");
}

}  // namespace localllm::cuda
