// Checks that several ops share; each names the op that was called. Failures are std::runtime_error.
#pragma once

#include "arguments.h"

namespace localllm {

// The value, which lies in least…most.
int64_t cast(const Op& op, const char* name, int64_t value, int64_t least, int64_t most);

// Both caches [pages, page_size, kv_heads, dim] of one type -> slots
int64_t cache_slots(const Op& op, Argument& keys, Argument& values, int64_t kv_heads, int64_t dim);

// Of the cache: one of the float types or, on CUDA devices, e4m3.
struct CacheType {
  Type type;
  bool e4m3;
};
CacheType cache_type(const Op& op, const Argument& keys);

// cos and sin [tokens, half] float32 for heads of `dim` -> half
int64_t rotation_half(const Op& op, Argument& cos, Argument& sin, int64_t tokens, int64_t dim);

// Norms of heads [dim] each, of one type, into `args`, which knows dim; null: none.
void head_norms(const Op& op, AppendArgs& args, const Tensor* query, const Tensor* key);

// Rows, sinks and numbers into `args`, which knows tokens, heads and pages (`pages` of them). Every row's tokens and
// pages lie within what there is. -> positions that are read.
int64_t attention_rows(const Op& op, AttentionArgs& args, int64_t pages, const Tensor& row_starts,
                       const Tensor& context_lens, const Tensor& page_table, const std::optional<Tensor>& sinks,
                       double scale, int64_t window, double soft_cap);

// The group as the layout wants it: of int4 and fp8 only.
int64_t check_group(const char* op, Format format, int64_t ins, int64_t group);

void check_packed(const char* op, Argument& packed, Format format, int64_t outs, int64_t ins, int64_t group);

}  // namespace localllm
