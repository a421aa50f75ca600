// Checks that several ops share; each names the op that was called. Failures are std::runtime_error.
#pragma once

#include "arguments.h"

namespace localllm {

// The value, which lies in least…most.
int64_t cast(const char* op, const char* name, int64_t value, int64_t least, int64_t most);

// Both caches [pages, page_size, kv_heads, dim] of one type -> slots
int64_t cache_slots(const char* op, Argument& keys, Argument& values, int64_t kv_heads, int64_t dim);

// Every row's tokens and pages lie within what there is; -> positions that are read.
int64_t check_rows(const AttentionArgs& args, int64_t pages);

// The group as the layout wants it: of int4 and fp8 only.
int64_t check_group(const char* op, Format format, int64_t ins, int64_t group);

void check_packed(const char* op, Argument& packed, Format format, int64_t outs, int64_t ins, int64_t group);

}  // namespace localllm
