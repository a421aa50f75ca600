// Argument checks that several ops share. A failed check throws std::runtime_error with the name of the op.
#pragma once

#include "arguments.h"

namespace localllm {

// Checks that min_value <= value <= max_value and returns the value.
int64_t check_range(const Op& op, const char* name, int64_t value, int64_t min_value, int64_t max_value);

// Checks the key and value caches: [pages, page_size, kv_heads, dim] each, of one type. Returns the number of slots.
int64_t cache_slots(const Op& op, Argument& keys, Argument& values, int64_t kv_heads, int64_t dim);

// The element type of the cache: f32, bf16 or f16; on CUDA devices also e4m3.
struct CacheType {
  Type type;
  bool e4m3;
};
CacheType cache_type(const Op& op, const Argument& keys);

// Checks cos and sin: [tokens, half] float32 each, for heads of `dim` elements. Returns half.
int64_t rotation_half(const Op& op, Argument& cos, Argument& sin, int64_t tokens, int64_t dim);

// Checks the norm weights of the query and key heads ([args.dim] each, of one type; null: no norm) and stores them in
// `args`. Set args.dim first.
void head_norms(const Op& op, AppendArgs& args, const Tensor* query, const Tensor* key);

// Checks the row tables, sinks and scalar arguments of attention and stores them in `args`. Set the tokens, heads and
// page fields of `args` first. `pages` is the number of pages of the cache: every page id of a row must be below it.
// Returns the number of positions that attention reads.
int64_t attention_rows(const Op& op, AttentionArgs& args, int64_t pages, const Tensor& row_starts,
                       const Tensor& context_lens, const Tensor& page_table, const std::optional<Tensor>& sinks,
                       double scale, int64_t window, double soft_cap);

// Checks the group size (inputs) of int4, fp8 and mxfp4 weights and returns it. Returns 0 for other formats.
int64_t check_group(const char* op, Format format, int64_t in_features, int64_t group);

// Checks that `packed` is uint8, dense, and has the size of a packed weight of this format and shape.
void check_packed(const char* op, Argument& packed, Format format, int64_t out_features, int64_t in_features,
                  int64_t group);

}  // namespace localllm
