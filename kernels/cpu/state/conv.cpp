// Causal convolutions over the tokens of each row, in blocks of channels. The inputs that the next tokens need stay in
// the L1 cache.
#include "../layers/gate.h"
#include "rows.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t BLOCK = 512;  // channels: long enough runs of memory for the prefetcher

struct Block {
  int64_t first, count;
  float *weight, *bias;             // [width][BLOCK], [BLOCK]
  float* inputs[MAX_CONV_WIDTH - 1];  // [BLOCK] each: the last inputs, the oldest first
};

// The convolution of one vector of channels, whose newest input is `x`. Overwrites the oldest input.
template <int HISTORY, class N>
static inline F32 convolve(const Block& block, int64_t history, int64_t i, N n, F32 x) {
  int64_t taps = HISTORY ? HISTORY : history;
  F32 sum = fma(load(block.weight + taps * BLOCK + i, n), x, load(block.bias + i, n));
#pragma GCC unroll 4
  for (int64_t tap = 0; tap < taps; tap++)
    sum = fma(load(block.weight + tap * BLOCK + i, n), load(block.inputs[tap] + i, n), sum);
  store(block.inputs[0] + i, x, n);
  return sum;
}

// HISTORY: number of earlier inputs; 0: that of args.
template <class T, int HISTORY>
void row_block(const ConvArgs& args, const StateRow& row, Block& block) {
  int64_t history = args.width - 1;
  for (int64_t token = row.begin; token < row.end; token++) {
    const T* x = (const T*)args.x + token * args.x_stride + block.first;
    T* out = (T*)args.out + token * args.channels + block.first;
    if (args.gated) {
      const T *after = x + args.channels, *y = after + args.channels;
      each_vector(0, block.count, [&](int64_t i, auto n) {
        F32 input = load(x + i, n) * load(y + i, n);
        store(out + i, load(after + i, n) * convolve<HISTORY>(block, history, i, n, input), n);
      });
    } else {
      each_vector(0, block.count, [&](int64_t i, auto n) {
        store(out + i, silu(convolve<HISTORY>(block, history, i, n, load(x + i, n))), n);
      });
    }
    float* newest = block.inputs[0];
    for (int64_t tap = 1; tap < history; tap++) block.inputs[tap - 1] = block.inputs[tap];
    block.inputs[history - 1] = newest;
  }
}

template <class T>
void row_block_of_width(const ConvArgs& args, const StateRow& row, Block& block) {
  switch (args.width) {
    case 3: return row_block<T, 2>(args, row, block);
    case 4: return row_block<T, 3>(args, row, block);
    default: return row_block<T, 0>(args, row, block);
  }
}

void load_weights(const ConvArgs& args, const Block& block) {
  for (int64_t tap = 0; tap < args.width; tap++)
    widen(args.weight_type, args.weight, tap * args.channels + block.first, block.weight + tap * BLOCK, block.count);
  if (args.bias) widen(args.weight_type, args.bias, block.first, block.bias, block.count);
  else copy_floats(nullptr, block.bias, block.count);
}

}  // namespace

void causal_conv(const ConvArgs& args, const Worker& worker) {
  int64_t rows = args.rows.rows, history = args.width - 1, size = history * args.channels;
  float* memory = (float*)worker.scratch(2 * args.width * BLOCK * sizeof(float));
  Block block = {-1, 0, memory, memory + args.width * BLOCK, {}};
  for (int64_t tap = 0; tap < history; tap++) block.inputs[tap] = memory + (args.width + 1 + tap) * BLOCK;
  Share share = share_of(rows * ((args.channels + BLOCK - 1) / BLOCK), worker);
  for (int64_t item = share.begin; item < share.end; item++) {
    int64_t first = item / rows * BLOCK;
    if (first != block.first) {
      block.first = first;
      block.count = args.channels - first < BLOCK ? args.channels - first : BLOCK;
      load_weights(args, block);
    }
    StateRow row = state_row(args.rows, item % rows, args.states, size);
    for (int64_t tap = 0; tap < history; tap++)
      copy_floats(row.continues ? row.stored + tap * args.channels + first : nullptr, block.inputs[tap],
                  block.count);
    switch (args.type) {
      case Type::f32: row_block_of_width<float>(args, row, block); break;
      case Type::bf16: row_block_of_width<bf16>(args, row, block); break;
      case Type::f16: row_block_of_width<f16>(args, row, block); break;
    }
    for (int64_t tap = 0; row.stored && tap < history; tap++)
      copy_floats(block.inputs[tap], row.stored + tap * args.channels + first, block.count);
  }
}

}  // namespace localllm::VARIANT
