// The experts of a layer, for the weights of any format.
//
// An item of work is a segment (some rows of one expert) × one panel of the outputs. A worker that begins a segment
// copies the segment's rows to the layout of the products, in memory of its own; the workers divide the items
// dynamically. The phases, with barriers between them:
//   1. int8 activations only: quantise the tokens, once each and not once per choice
//   2. gate and up products of the same panel, and the activation -> `gated`
//   3. int8 activations only: quantise the rows of `gated`
//   4. down products -> `results`, in float32
//   5. sum the results of each token in the order of its choices
//
// Rows, the format of a segment's activations, is a class with these members. The LinearArgs of a product has the
// inputs, the format and the group; those of a segment also have its rows; those of a panel have one panel as weight.
//   row_bytes(product)             bytes of a row that phase 1 or 3 prepares; 0: the products read the rows themselves
//   prepare(product, row, to)      prepares a row
//   memory_bytes(product, rows)    memory of a worker for a segment of at most `rows` rows
//   Rows(product)                  at the start of a phase
//   arrange(segment, memory)       copies the rows of a segment
//   multiply(panel, next)          writes the products of these rows; `next` is the weight of the product after this one
//   end()                          at the end of a phase. No destructor does this: it would need code for exceptions,
//                                  which all ISA variants would share
#pragma once

#include "../vectors/convert.h"
#include "../layers/gate.h"

namespace localllm::VARIANT {
namespace {

static inline LinearArgs product_of(const ExpertsArgs& args, const void* weight, int64_t in_features, int64_t group) {
  LinearArgs product{};
  product.weight = weight;
  product.out_type = Type::f32;
  product.x_type = args.type;
  product.format = args.format;
  product.wide = args.wide;
  product.in_features = in_features;
  product.out_features = PANEL;
  product.group = group;
  return product;
}

static inline LinearArgs gate_up_product(const ExpertsArgs& args) {
  LinearArgs product = product_of(args, args.gate_up, args.hidden, args.gate_up_group);
  product.x = args.x;
  product.x_stride = args.x_stride;
  product.out_stride = PANEL;
  return product;
}

static inline LinearArgs down_product(const ExpertsArgs& args) {
  LinearArgs product = product_of(args, args.down, args.inner, args.down_group);
  product.x = args.gated;
  product.x_stride = args.inner;
  product.out_stride = args.hidden;
  return product;
}

static inline int64_t max_rows(const ExpertsArgs& args) {
  return args.plan.rows < SEGMENT_ROWS ? args.plan.rows : SEGMENT_ROWS;
}

template <class Rows>
static inline size_t shared_bytes(const ExpertsArgs& args) {
  int64_t tokens = args.tokens * Rows::row_bytes(gate_up_product(args));
  int64_t gated = args.plan.rows * Rows::row_bytes(down_product(args));
  return tokens > gated ? tokens : gated;
}

// Prepares the rows of x in shared memory. The product then reads them there.
template <class Rows>
static inline void prepare_rows(LinearArgs& product, int64_t rows, void* shared, const Worker& worker) {
  int64_t bytes = Rows::row_bytes(product);
  if (!bytes) return;
  Share share = share_of(rows, worker);
  for (int64_t row = share.begin; row < share.end; row++) Rows::prepare(product, row, (uint8_t*)shared + row * bytes);
  worker.barrier();
  product.x = shared;
  product.x_stride = bytes;
}

static inline int64_t row_size(const LinearArgs& product, bool prepared) {
  if (prepared) return product.x_stride;
  return product.x_stride * (product.x_type == Type::f32 ? 4 : 2);
}

// Calls body(segment, arguments of the segment, panel) for the items of this worker. With `row_tokens` the rows of a
// segment are those of its tokens, else they are consecutive rows of x.
template <class Rows, class Body>
static inline void each_item(const ExpertsArgs& args, const LinearArgs& product, const int32_t* row_tokens,
                             int64_t panels, Rows& rows, void* memory, const Worker& worker, Body body) {
  int64_t current = -1, row_bytes = row_size(product, Rows::row_bytes(product) > 0);
  LinearArgs arranged = product;
  for (Chunks chunks(args.plan.count * panels, worker); chunks.next();) {
    for (long item = chunks.begin; item < chunks.end; item++) {
      const Segment& segment = args.plan.segments[item / panels];
      if (item / panels != current) {
        current = item / panels;
        arranged.rows = segment.rows;
        if (row_tokens) arranged.row_ids = row_tokens + segment.begin;
        else arranged.x = (const char*)product.x + segment.begin * row_bytes;
        rows.arrange(arranged, memory);
      }
      body(segment, arranged, item % panels);
    }
  }
}

// out [rows, PANEL] = activation(gates) * ups, for gates and ups [rows, PANEL]. `stride`: elements from row to row of
// out.
template <class T, class Function>
static inline void gate_rows(const float* gates, const float* ups, int64_t rows, T* out, int64_t stride,
                             Function function) {
  for (int64_t row = 0; row < rows; row++) {
    for (int j = 0; j < PANEL; j += WIDTH) {
      int64_t i = row * PANEL + j;
      store(out + row * stride + j, function(load(gates + i), load(ups + i)));
    }
  }
}

template <class T>
static inline void gate_panel(ExpertGate gate, const float* gates, const float* ups, int64_t rows, T* out,
                              int64_t stride) {
  switch (gate) {
    case ExpertGate::silu:
      return gate_rows(gates, ups, rows, out, stride, [](F32 a, F32 b) { return silu(a) * b; });
    case ExpertGate::gelu:
      return gate_rows(gates, ups, rows, out, stride, [](F32 a, F32 b) { return gelu(a) * b; });
    case ExpertGate::gelu_tanh:
      return gate_rows(gates, ups, rows, out, stride, [](F32 a, F32 b) { return gelu_tanh(a) * b; });
    case ExpertGate::clamped_swiglu:
      return gate_rows(gates, ups, rows, out, stride, [](F32 a, F32 b) { return clamped_swiglu(a, b); });
  }
}

template <class Rows>
static inline void multiply_gate_up(const ExpertsArgs& args, const Worker& worker) {
  LinearArgs product = gate_up_product(args);
  int64_t panels = args.inner / PANEL, bytes = panel_bytes(args.format, args.hidden, args.gate_up_group);
  int64_t block = max_rows(args) * PANEL;
  float* gates = (float*)worker.scratch(2 * block * 4 + Rows::memory_bytes(product, max_rows(args)));
  float* ups = gates + block;
  prepare_rows<Rows>(product, args.tokens, args.shared, worker);
  Rows rows(product);
  each_item(args, product, args.plan.tokens, panels, rows, ups + block, worker,
            [&](const Segment& segment, LinearArgs panel_args, int64_t panel) {
    int64_t first = segment.expert * 2 * panels + panel;  // panel of the gates in gate_up
    const char* weight = (const char*)args.gate_up + first * bytes;
    const float* bias = args.gate_up_bias ? args.gate_up_bias + first * PANEL : nullptr;
    panel_args.weight = weight;
    panel_args.bias = bias;
    panel_args.out = gates;
    rows.multiply(panel_args, weight + panels * bytes);
    panel_args.weight = weight + panels * bytes;
    panel_args.bias = bias ? bias + args.inner : nullptr;
    panel_args.out = ups;
    rows.multiply(panel_args, weight + bytes);
    as_stored(args.type, args.gated, [&](auto* gated) {
      gate_panel(args.gate, gates, ups, segment.rows, gated + segment.begin * args.inner + panel * PANEL, args.inner);
    });
  });
  Rows::end();
}

template <class Rows>
static inline void multiply_down(const ExpertsArgs& args, const Worker& worker) {
  LinearArgs product = down_product(args);
  int64_t panels = args.hidden / PANEL, bytes = panel_bytes(args.format, args.inner, args.down_group);
  void* memory = worker.scratch(Rows::memory_bytes(product, max_rows(args)));
  prepare_rows<Rows>(product, args.plan.rows, args.shared, worker);
  Rows rows(product);
  each_item(args, product, nullptr, panels, rows, memory, worker,
            [&](const Segment& segment, LinearArgs panel_args, int64_t panel) {
    int64_t first = segment.expert * panels + panel;
    panel_args.weight = (const char*)args.down + first * bytes;
    panel_args.bias = args.down_bias ? args.down_bias + first * PANEL : nullptr;
    panel_args.out = args.results + segment.begin * args.hidden + panel * PANEL;
    rows.multiply(panel_args, (const char*)panel_args.weight + bytes);
  });
  Rows::end();
}

constexpr int64_t COLUMNS = 256;  // outputs of a token that a worker sums at a time

static inline void sum_results(const ExpertsArgs& args, const Worker& worker) {
  int64_t parts = (args.hidden + COLUMNS - 1) / COLUMNS;
  Share share = share_of(args.tokens * parts, worker);
  for (int64_t item = share.begin; item < share.end; item++) {
    int64_t token = item / parts, begin = item % parts * COLUMNS;
    int64_t end = begin + COLUMNS < args.hidden ? begin + COLUMNS : args.hidden;
    const float* weights = args.weights + token * args.top_k;
    const int32_t* rows = args.plan.positions + token * args.top_k;
    as_stored(args.type, args.out, [&](auto* out) {
      for (int64_t j = begin; j < end; j += WIDTH) {
        F32 sum = zero();
        for (int64_t c = 0; c < args.top_k; c++)
          sum = fma(set1(weights[c]), load(args.results + rows[c] * args.hidden + j), sum);
        store(out + token * args.hidden + j, sum);
      }
    });
  }
}

template <class Rows>
static inline void run_experts(const ExpertsArgs& args, const Worker& worker) {
  multiply_gate_up<Rows>(args, worker);
  worker.barrier();
  multiply_down<Rows>(args, worker);
  worker.barrier();
  sum_results(args, worker);
}

}  // namespace
}  // namespace localllm::VARIANT
