// Every kernel of the CPU and what it takes: raw pointers and plain numbers, checked by the caller. No torch here.
//
// Kernels are shares of work (worker.h). One that needs memory all workers see is handed it as `shared`; the function
// beside it in the table says how many bytes. Strides count elements, not bytes; the innermost dimension is dense.
#pragma once

#include "ceiling.h"
#include "layout.h"
#include "worker.h"

namespace localllm {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2 };

struct NormArgs {  // out = x / rms(x) * (offset + weight); with a residual, x + residual is normalised and kept there
  void* out;
  const void* x;
  void* residual;  // [rows, dim] dense, written; null: none
  const void* weight;
  const void* bias;  // layer norm only; null: none
  Type type;         // of out, x, residual
  Type weight_type;
  int64_t rows, heads, dim;           // x is [rows, heads, dim]; heads = 1 for a plain [rows, dim]
  int64_t x_stride, out_stride;       // from row to row; heads follow each other densely
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

enum class Rotation : int { neox = 0, interleaved = 1 };  // pairs (i, i + half) or (2i, 2i + 1)

struct RopeArgs {  // in place
  void* x;
  Type type;
  const float* cos;
  const float* sin;  // [tokens, half] each
  Rotation rotation;
  int64_t tokens, heads, dim, half, stride;
};

struct StoreArgs {  // token t's key and value into slot slots[t] of the pages
  const void* key;
  const void* value;
  void* key_pages;
  void* value_pages;
  Type type, cache_type;
  const int64_t* slots;
  int64_t tokens, width, key_stride, value_stride;  // width = kv heads * dim
  int64_t limit;  // slots there are; where the host cannot look at them, those beyond are left out
  bool cache_e4m3;  // pages are float8_e4m3fn, whatever cache_type is; on CUDA devices only
};

struct CopyPagesArgs {  // all sources are read before any target is written
  void* pages;
  const int64_t* sources;
  const int64_t* targets;
  int64_t copies, page_bytes;
  void* shared;  // copies * page_bytes
  int64_t limit;  // pages there are, as in StoreArgs
};

struct AppendArgs {  // head norms, rotation and store in one pass over [tokens, heads + 2 kv_heads, dim]
  void* qkv;  // queries are left here, normalised and turned; keys and values go to the pages
  Type type, cache_type, norm_type;
  const void* query_norm;
  const void* key_norm;  // [dim] each; null: heads are not normalised
  float eps, offset;
  const float* cos;
  const float* sin;
  Rotation rotation;
  const int64_t* slots;
  void* key_pages;
  void* value_pages;
  int64_t tokens, heads, kv_heads, dim, half, stride;
  int64_t limit;  // as in StoreArgs
  bool cache_e4m3;
};

struct AttentionArgs {
  void* out;          // [tokens, heads, dim] dense
  const void* query;  // [tokens, heads, dim], query_stride from token to token
  Type type, cache_type;
  const void* key_pages;
  const void* value_pages;  // [pages, page_size, kv_heads, dim] dense
  const int32_t* row_starts;    // [rows + 1]
  const int32_t* context_lens;  // [rows], this step's tokens included
  const int32_t* page_table;    // [rows, pages_per_row]
  const float* sinks;           // [heads] or null
  int64_t rows, tokens, heads, kv_heads, dim, query_stride, page_size, pages_per_row;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
  void* shared;
};

struct LinearArgs {  // out = x @ weightᵀ + bias
  void* out;
  const void* x;
  const void* weight;  // packed (layout.h)
  const float* bias;   // [outs] or null
  Type out_type, x_type;
  Format format;
  int64_t rows, outs, ins, group, x_stride, out_stride;
  bool wide;     // int4: activations stay as they are (W4A16) instead of becoming int8 per token and group (W4A8)
  void* shared;  // quantised or rearranged activations
};

struct PackArgs {  // from the plain weight [outs, ins] to layout.h
  void* packed;
  const void* data;    // f32, bf16, f16, int8, e4m3 bytes [outs, ins], or nibbles [outs, ceil(ins / 2)], even k low
  const void* scales;  // int8: float [outs]; int4: half [outs, groups]; fp8: float [outs, groups]
  const uint8_t* zeros;  // int4: [outs, groups]
  Format format;
  int64_t outs, ins, group;
};

struct EmbeddingArgs {  // out[t] = weight[tokens[t]] * scale
  void* out;
  const int32_t* tokens;
  const void* weight;  // [vocab, dim] dense
  Type type, weight_type;
  int64_t count, vocab, dim;
  float scale;
};

struct GreedyArgs {  // the likeliest token, the smallest id among equals
  int64_t* tokens;
  const float* logits;
  int64_t rows, vocab, stride;
  void* shared;
};

struct DrawArgs {  // see kernels/ops/sampling.py: draw
  int64_t* tokens;
  const float* logits;
  const float* temperature;
  const int32_t* seed_low;
  const int32_t* seed_high;
  const int32_t* position;
  const int32_t* top_k;  // null: off for every row
  const float* top_p;
  const float* min_p;
  int64_t rows, vocab, stride;
  void* shared;
};

struct MaskArgs {  // -inf where a token's bit is 0
  float* logits;
  const int64_t* rows;
  const int32_t* words;  // [count, words_per_row]
  int64_t count, words_per_row, vocab, stride;
};

struct LogprobArgs {  // of each row's token, natural logarithm of the softmax
  float* out;
  float* normaliser;  // [rows] log of the sum of exp, for whoever wants more tokens
  const float* logits;
  const int64_t* tokens;
  int64_t rows, vocab, stride;
  void* shared;
};

// One lane: all kernels compiled for one instruction set. A lane may borrow entries of a smaller one.
struct Lane {
  const char* name;
  void (*rms_norm)(const NormArgs&, const Worker&);
  void (*layer_norm)(const NormArgs&, const Worker&);
  void (*gate)(const ActivationArgs&, const Worker&);
  void (*rope)(const RopeArgs&, const Worker&);
  void (*store)(const StoreArgs&, const Worker&);
  void (*copy_pages)(const CopyPagesArgs&, const Worker&);
  void (*append)(const AppendArgs&, const Worker&);
  void (*attention)(const AttentionArgs&, const Worker&);
  size_t (*attention_shared)(const AttentionArgs&, int workers);
  void (*linear)(const LinearArgs&, const Worker&);  // every format
  size_t (*linear_shared)(const LinearArgs&, int workers);
  void (*pack)(const PackArgs&, const Worker&);
  void (*embedding)(const EmbeddingArgs&, const Worker&);
  void (*greedy)(const GreedyArgs&, const Worker&);
  size_t (*greedy_shared)(const GreedyArgs&, int workers);
  void (*draw)(const DrawArgs&, const Worker&);
  size_t (*draw_shared)(const DrawArgs&, int workers);
  void (*mask)(const MaskArgs&, const Worker&);
  void (*logprob)(const LogprobArgs&, const Worker&);
  size_t (*logprob_shared)(const LogprobArgs&, int workers);
  void (*ceiling)(const CeilingArgs&, const Worker&);
};

// The lane that this CPU and system allow, or the one asked for (dispatch.cpp).
const Lane& lane();

}  // namespace localllm
