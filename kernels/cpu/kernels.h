// All CPU kernels and their arguments: raw pointers and numbers that the caller has checked. This file does not need
// torch.
//
// A kernel computes one worker's share (team/worker.h). If its workers share memory, `shared` points to that memory, and
// the function `<kernel>_shared` of the table returns its size in bytes. Strides count elements. The innermost dimension
// is dense.
#pragma once

#include "bound.h"
#include "products/layout.h"
#include "team/worker.h"

namespace localllm {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2 };

// out = x / rms(x) * (offset + weight). With a residual: residual += x, and the kernel normalises the new residual.
struct NormArgs {
  void* out;
  const void* x;
  void* residual;  // [rows, dim] dense, input and output; null: no residual
  const void* weight;
  Type type;  // type of out, x and residual
  Type weight_type;
  int64_t rows, heads, dim;      // x is [rows, heads, dim]; heads = 1 for x of [rows, dim]
  int64_t x_stride, out_stride;  // elements from row to row; the heads of a row are dense
  float eps, offset;
};

enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2 };

struct ActivationArgs {  // out[r, i] = activation(x[r, i]) * x[r, dim + i]
  void* out;
  const void* x;
  Type type;
  Activation kind;
  int64_t rows, dim, x_stride, out_stride;
};

enum class Rotation : int { neox = 0, interleaved = 1 };  // rotated pairs: (i, i + half) or (2i, 2i + 1)

struct RopeArgs {  // rotates x in place
  void* x;
  Type type;
  const float* cos;
  const float* sin;  // cos and sin: [tokens, half] each
  Rotation rotation;
  int64_t tokens, heads, dim, half, stride;
};

struct StoreArgs {  // writes the key and the value of token t to slot slots[t] of the pages
  const void* key;
  const void* value;
  void* key_pages;
  void* value_pages;
  Type type, cache_type;
  const int64_t* slots;
  int64_t tokens, width, key_stride, value_stride;  // width = kv heads * dim
  int64_t limit;    // number of slots of the cache; CUDA kernels skip tokens whose slot is not below it
  bool cache_e4m3;  // CUDA only: the pages are float8_e4m3fn, and cache_type is not used
};

struct CopyPagesArgs {  // the kernel reads all sources before it writes the first target
  void* pages;
  const int64_t* sources;
  const int64_t* targets;
  int64_t copies, page_bytes;
  void* shared;   // copies * page_bytes bytes
  int64_t limit;  // number of pages; CUDA kernels skip copies whose source or target is not below it
};

struct AppendArgs {  // normalises heads, rotates and stores in one pass
  void* qkv;  // [tokens, heads + 2 kv_heads, dim]; the kernel normalises and rotates the queries in place
  Type type, cache_type, norm_type;
  const void* query_norm;
  const void* key_norm;  // norm weights: [dim] each; null: no normalisation of heads
  float eps, offset;
  const float* cos;
  const float* sin;
  Rotation rotation;
  const int64_t* slots;
  void* key_pages;
  void* value_pages;
  int64_t tokens, heads, kv_heads, dim, half, stride;
  int64_t limit;  // number of slots, as in StoreArgs
  bool cache_e4m3;
};

struct AttentionArgs {
  void* out;          // [tokens, heads, value_dim] dense
  const void* query;  // [tokens, heads, dim]; query_stride is the distance between tokens
  Type type, cache_type;
  const void* key_pages;        // [pages, page_size, kv_heads, dim] dense
  const void* value_pages;      // as key_pages, value_dim elements of each head; latents: an address in key_pages
  const int32_t* row_starts;    // [rows + 1]
  const int32_t* context_lens;  // [rows], including the tokens of this step
  const int32_t* page_table;    // [rows, pages_per_row]
  const float* sinks;           // [heads] or null
  int64_t rows, tokens, heads, kv_heads, dim, value_dim, query_stride, page_size, pages_per_row;
  float scale, soft_cap;  // soft_cap 0: no cap
  int64_t window;         // 0: no sliding window
  void* shared;
};

struct LinearArgs {  // out = x @ weightᵀ + bias
  void* out;
  const void* x;
  const void* weight;  // packed (products/layout.h)
  const float* bias;   // [out_features] or null
  Type out_type, x_type;
  Format format;
  int64_t rows, out_features, in_features, group, x_stride, out_stride;
  bool wide;     // int4: float activations (W4A16); false: int8 activations with a scale per token and group (W4A8)
  void* shared;  // quantised or rearranged activations
  const int32_t* row_ids;  // only inside `experts`: [rows], the row of x that each row of out uses; null: in order
};

enum class ExpertGate : int { silu = 0, gelu = 1, gelu_tanh = 2, clamped_swiglu = 3 };

constexpr int64_t SEGMENT_ROWS = 128;  // maximum rows of a segment

// Some rows of one expert, which a worker multiplies with one panel at a time. A row is one choice of a token.
struct Segment {
  int32_t expert, begin, rows;  // rows [begin, begin + rows) in the order of the experts
};

// The rows of the experts, sorted by expert and then by token (moe/plan.h).
struct ExpertPlan {
  const int32_t* tokens;     // [rows] the token of each row
  const int32_t* positions;  // [tokens, top_k] the row of each choice of a token
  const Segment* segments;   // [count]
  int64_t count, rows;
  int64_t tiles;  // number of tiles of 16 rows that the segments have
};

struct ExpertsArgs {  // out[t] = sum of weights[t, c] * down(gate(gate_up(x[t]))) over the experts c that t chose
  void* out;
  const void* x;  // [tokens, hidden]; x_stride is the distance between tokens
  Type type;      // type of x, out and the activations
  const float* weights;  // [tokens, top_k]
  ExpertPlan plan;
  const void* gate_up;        // packed (products/layout.h), experts * 2 * inner outputs: gates first, then ups
  const void* down;           // packed, experts * hidden outputs
  const float* gate_up_bias;  // [experts, 2 * inner] or null
  const float* down_bias;     // [experts, hidden] or null
  Format format;
  bool wide;  // as in LinearArgs
  ExpertGate gate;
  int64_t tokens, top_k, hidden, inner, x_stride, gate_up_group, down_group;  // hidden and inner: multiples of PANEL
  void* gated;     // [plan.rows, inner] of `type`: the inputs of the down products
  float* results;  // [plan.rows, hidden]: the outputs of the down products
  void* shared;    // quantised activations
};

enum class RouterScore : int { softmax = 0, sigmoid = 1 };

// Each token chooses the top_k experts with the largest scores; kernels/ops/moe.py defines the op.
struct RouteArgs {
  int32_t* experts;         // [tokens, top_k]
  float* weights;           // [tokens, top_k]
  const float* logits;      // [tokens, count]
  const float* correction;  // [count] or null: added to the scores for the choice only
  int64_t tokens, count, top_k, stride;
  int64_t groups, top_groups;  // count is a multiple of groups
  RouterScore score;
  bool renormalise, top2;  // top2: the score of a group is the sum of its two largest scores, else the largest
  float scale;
};

struct PackArgs {  // converts a weight [out_features, in_features] to the packed layout of products/layout.h
  void* packed;
  // f32, bf16, f16, int8 or e4m3 [out_features, in_features]. int4: bytes [out_features, ceil(in_features / 2)], even
  // inputs in the low nibble.
  const void* data;
  const void* scales;    // int8: float [out_features]; int4: half, fp8: float, mxfp4: uint8 [out_features, groups]
  const uint8_t* zeros;  // int4: zero points [out_features, groups]
  Format format;
  int64_t out_features, in_features, group;
};

struct EmbeddingArgs {  // out[t] = weight[tokens[t]] * scale
  void* out;
  const int32_t* tokens;
  const void* weight;  // [vocab, dim] dense
  Type type, weight_type;
  int64_t count, vocab, dim;
  float scale;
};

constexpr int MAX_LORA_SLICES = 3;  // q, k and v

// out[t] += scales[t] * B[slot] (A[slot] x[t]) for each token t of each tile. All tokens of a tile have one slot.
struct LoraArgs {
  void* out;
  const void* x;       // [tokens, in_features]; not read by lora_look_up
  const int32_t* ids;  // [tokens]: lora_look_up uses column A[slot][:, ids[t]] in place of A[slot] x[t]
  const void* a;       // [slots, slices * rank, in_features]; each slot is dense
  const void* b;       // [slots, out_features, rank]; each slot is dense
  Type out_type, type;  // type: of x, a and b
  const float* scales;  // [tokens]
  const int32_t* order;       // [tokens]: tile i has the tokens order[starts[i]] … order[starts[i + 1] - 1]
  const int32_t* starts;      // [tiles + 1]
  const int32_t* tile_slots;  // [tiles]
  float* inner;               // [tokens, slices * rank]: scales * A x, in the order of `order`
  int64_t tiles, in_features, rank, slices;  // tiles 0: no token has an adapter
  int64_t widths[MAX_LORA_SLICES];           // outputs of each slice
  int64_t x_stride, out_stride, a_stride, b_stride;
};

// The rows of a step and their state slots. kernels/ops/state.py defines them and the next three ops.
struct StateRows {
  const int32_t* row_starts;    // [rows + 1]
  const int32_t* context_lens;  // [rows], including the tokens of this step
  const int32_t* slots;         // [rows]; -1: no slot
  int64_t rows;
};

constexpr int64_t MAX_CONV_WIDTH = 8;

struct ConvArgs {  // silu of the causal convolution of each channel
  void* out;           // [tokens, channels] dense
  const void* x;       // [tokens, channels], or with gates [tokens, 3 * channels]
  const void* weight;  // [width, channels]
  const void* bias;    // [channels] of the weight's type, or null
  Type type, weight_type;
  float* states;  // [slots, width - 1, channels]
  StateRows rows;
  int64_t channels, width, x_stride;
  bool gated;  // x is b, c and y: c * convolution of b * y, without silu
};

// Gated DeltaNet, or without `beta` the scan of Mamba2.
struct ScanArgs {
  void* out;      // [tokens, heads, value_dim] dense
  const void* x;  // [tokens, …]; each token has queries [key_heads, key_dim], keys and values [heads, value_dim]
  int64_t query, key, value;  // their first elements in a token
  const void* step;           // [tokens, heads]
  const void* beta;           // [tokens, heads] or null
  Type type;
  const float* rates;    // [heads]
  const float* dt_bias;  // [heads]
  const float* skip;     // [heads] or null
  float dt_min, dt_max;
  float* states;  // [slots, heads, key_dim, value_dim]
  StateRows rows;
  int64_t heads, key_heads, key_dim, value_dim, stride, step_stride, beta_stride;
};

enum class GateOrder : int { norm_gate = 0, gate_norm = 1 };

struct GatedNormArgs {
  void* out;  // [tokens, groups, dim] dense
  const void* x;
  const void* gate;
  const void* weight;  // [groups, dim], or [dim] if the groups share it
  Type type, weight_type;
  int64_t tokens, groups, dim, x_stride, gate_stride;
  float eps;
  GateOrder order;
  bool shared_weight;
};

struct GreedyArgs {  // the token with the largest logit; the smallest id if several logits are equal
  int64_t* tokens;
  const float* logits;
  int64_t rows, vocab, stride;
  void* shared;
};

struct DrawArgs {  // defined by `draw` of kernels/ops/sampling.py; every array is [rows]
  int64_t* tokens;
  const float* logits;
  const float* temperature;
  const int32_t* seed_low;
  const int32_t* seed_high;
  const int32_t* position;
  const int32_t* top_k;  // top_k, top_p, min_p: null disables the filter for all rows
  const float* top_p;
  const float* min_p;
  int64_t rows, vocab, stride;
  void* shared;
};

struct MaskArgs {  // sets the logit of every token whose bit is 0 to -inf
  float* logits;
  const int64_t* rows;
  const int32_t* words;  // [count, words_per_row]
  int64_t count, words_per_row, vocab, stride;
};

struct LogprobArgs {  // the logprob of one token per row
  float* out;
  float* normaliser;  // [rows] logarithm of the sum of exp(logit); logit - normaliser is the logprob of any token
  const float* logits;
  const int64_t* tokens;
  int64_t rows, vocab, stride;
  void* shared;
};

// An ISA variant: all kernels, compiled for one instruction set. Some entries may be the kernels of a smaller variant.
struct Variant {
  const char* name;
  void (*rms_norm)(const NormArgs&, const Worker&);
  void (*gate)(const ActivationArgs&, const Worker&);
  void (*rope)(const RopeArgs&, const Worker&);
  void (*store)(const StoreArgs&, const Worker&);
  void (*copy_pages)(const CopyPagesArgs&, const Worker&);
  void (*append)(const AppendArgs&, const Worker&);
  void (*attention)(const AttentionArgs&, const Worker&);
  size_t (*attention_shared)(const AttentionArgs&, int workers);
  void (*linear)(const LinearArgs&, const Worker&);  // all weight formats
  size_t (*linear_shared)(const LinearArgs&, int workers);
  void (*pack)(const PackArgs&, const Worker&);
  void (*route)(const RouteArgs&, const Worker&);
  void (*experts)(const ExpertsArgs&, const Worker&);
  size_t (*experts_shared)(const ExpertsArgs&);
  void (*embedding)(const EmbeddingArgs&, const Worker&);
  void (*lora_shrink)(const LoraArgs&, const Worker&);   // writes `inner`
  void (*lora_look_up)(const LoraArgs&, const Worker&);  // writes `inner` for an embedding
  void (*lora_expand)(const LoraArgs&, const Worker&);   // reads `inner` of all workers
  void (*causal_conv)(const ConvArgs&, const Worker&);
  void (*scan)(const ScanArgs&, const Worker&);
  void (*gated_norm)(const GatedNormArgs&, const Worker&);
  void (*greedy)(const GreedyArgs&, const Worker&);
  size_t (*greedy_shared)(const GreedyArgs&, int workers);
  void (*draw)(const DrawArgs&, const Worker&);
  size_t (*draw_shared)(const DrawArgs&, int workers);
  void (*mask)(const MaskArgs&, const Worker&);
  void (*logprob)(const LogprobArgs&, const Worker&);
  size_t (*logprob_shared)(const LogprobArgs&, int workers);
  void (*bound)(const BoundArgs&, const Worker&);
};

// The ISA variant in use: the fastest usable one, or the one that use_variant selected (isa/dispatch.h).
const Variant& variant();

}  // namespace localllm
