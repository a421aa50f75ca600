// Causal convolutions over the tokens of each row, in blocks of channels. The inputs that the next tokens need stay in
// the L1 cache.
#include "../layers/gate.h"
#include "rows.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t BLOCK = 128;  // channels

struct Block {
  int64_t first, count;
  float *weight, *bias, *history;  // [width][BLOCK], [BLOCK], [width - 1][BLOCK] the newest input last
};

// The convolution of one vector of channels, whose newest input is `x`. Moves the history on by one token.
template <class N>
static inline F32 convolve(const Block& block, int64_t history, int64_t i, N n, F32 x) {
  F32 sum = fma(load(block.weight + history * BLOCK + i, n), x, load(block.bias + i, n));
  for (int64_t tap = 0; tap < history; tap++) {
    F32 input = load(block.history + tap * BLOCK + i, n);
    sum = fma(load(block.weight + tap * BLOCK + i, n), input, sum);
    if (tap) store(block.history + (tap - 1) * BLOCK + i, input, n);
  }
  store(block.history + (history - 1) * BLOCK + i, x, n);
  return sum;
}

template <class T>
void row_block(const ConvArgs& args, const StateRow& row, const Block& block) {
  int64_t history = args.width - 1;
  for (int64_t token = row.begin; token < row.end; token++) {
    const T* x = (const T*)args.x + token * args.x_stride + block.first;
    T* out = (T*)args.out + token * args.channels + block.first;
    each_vector(0, block.count, [&](int64_t i, auto n) {
      if (args.gated) {
        const T *after = x + args.channels, *y = after + args.channels;
        store(out + i, load(after + i, n) * convolve(block, history, i, n, load(x + i, n) * load(y + i, n)), n);
      } else {
        store(out + i, silu(convolve(block, history, i, n, load(x + i, n))), n);
      }
    });
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
  Block block = {-1, 0, memory, memory + args.width * BLOCK, memory + (args.width + 1) * BLOCK};
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
      copy_floats(row.continues ? row.stored + tap * args.channels + first : nullptr, block.history + tap * BLOCK,
                  block.count);
    switch (args.type) {
      case Type::f32: row_block<float>(args, row, block); break;
      case Type::bf16: row_block<bf16>(args, row, block); break;
      case Type::f16: row_block<f16>(args, row, block); break;
    }
    for (int64_t tap = 0; row.stored && tap < history; tap++)
      copy_floats(block.history + tap * BLOCK, row.stored + tap * args.channels + first, block.count);
  }
}

}  // namespace localllm::VARIANT
