#include "checks.h"

namespace localllm {
namespace {

// Checks that the tokens and pages of every row exist. Returns the number of positions that attention reads.
int64_t check_rows(const Op& op, const AttentionArgs& args, int64_t pages) {
  if (args.row_starts[0] != 0 || args.row_starts[args.rows] != args.tokens)
    refuse(op.name, ": row_starts goes from ", args.row_starts[0], " to ", args.row_starts[args.rows], ", 0 to ",
           args.tokens, " (the tokens of query) expected");
  int64_t positions = 0;
  for (int64_t row = 0; row < args.rows; row++) {
    int64_t queries = (int64_t)args.row_starts[row + 1] - args.row_starts[row], context = args.context_lens[row];
    if (queries < 0) refuse(op.name, ": row_starts goes down after row ", row);
    if (queries == 0) continue;
    if (context < queries || context > args.pages_per_row * args.page_size)
      refuse(op.name, ": context_lens[", row, "] is ", context, ", ", queries, " (its new tokens) to ",
             args.pages_per_row * args.page_size, " (positions in its pages) expected");
    int64_t first_position = args.window ? context - queries - args.window + 1 : 0;
    first_position = first_position > 0 ? first_position : 0;
    positions += context - first_position;
    const int32_t* table = args.page_table + row * args.pages_per_row;
    for (int64_t page = first_position / args.page_size; page * args.page_size < context; page++)
      if (table[page] < 0 || table[page] >= pages)
        refuse(op.name, ": page_table[", row, ", ", page, "] is ", table[page], ", 0 to ", pages - 1, " expected");
  }
  return positions;
}

}  // namespace

int64_t check_range(const Op& op, const char* name, int64_t value, int64_t min_value, int64_t max_value) {
  if (value < min_value || value > max_value)
    refuse(op.name, ": ", name, " is ", value, ", ", min_value, " to ", max_value, " expected");
  return value;
}

int64_t cache_slots(const Op& op, Argument& keys, Argument& values, int64_t kv_heads, int64_t dim) {
  keys.shaped({ANY, ANY, kv_heads, dim}).dense();
  values.shaped({keys.size(0), keys.size(1), keys.size(2), keys.size(3)}).dense();
  if (keys.type() != values.type()) refuse(op.name, ": key_pages and value_pages are of different types");
  return keys.size(0) * keys.size(1);
}

CacheType cache_type(const Op& op, const Argument& keys) {
  bool e4m3 = op.cuda && keys.type() == ScalarType::Float8_e4m3fn;
  return {e4m3 ? Type::f32 : keys.number(), e4m3};
}

int64_t rotation_half(const Op& op, Argument& cos, Argument& sin, int64_t tokens, int64_t dim) {
  cos.shaped({tokens, ANY}).of(ScalarType::Float).dense();
  sin.shaped({tokens, cos.size(1)}).of(ScalarType::Float).dense();
  if (2 * cos.size(1) > dim) refuse(op.name, ": cos rotates ", 2 * cos.size(1), " dimensions, but heads have ", dim);
  return cos.size(1);
}

void head_norms(const Op& op, AppendArgs& args, const Tensor* query, const Tensor* key) {
  if (query) {
    Argument norm(op, "query_norm", *query);
    args.query_norm = norm.shaped({args.dim}).dense().data();
    args.norm_type = norm.number();
  }
  if (key) {
    Argument norm(op, "key_norm", *key);
    args.key_norm = norm.shaped({args.dim}).dense().data();
    if (query && norm.number() != args.norm_type) refuse(op.name, ": query_norm and key_norm are of different types");
    args.norm_type = norm.number();
  }
}

int64_t attention_rows(const Op& op, AttentionArgs& args, int64_t pages, const Tensor& row_starts,
                       const Tensor& context_lens, const Tensor& page_table, const std::optional<Tensor>& sinks,
                       double scale, int64_t window, double soft_cap) {
  Argument starts(op, "row_starts", row_starts), lens(op, "context_lens", context_lens);
  Argument table(op, "page_table", page_table);
  lens.shaped({ANY}).of(ScalarType::Int).dense();
  starts.shaped({lens.size(0) + 1}).of(ScalarType::Int).dense();
  table.shaped({lens.size(0), ANY}).of(ScalarType::Int).dense();
  args.row_starts = starts.data<int32_t>();
  args.context_lens = lens.data<int32_t>();
  args.page_table = table.data<int32_t>();
  args.rows = lens.size(0);
  args.pages_per_row = table.size(1);
  args.scale = (float)scale;
  args.soft_cap = (float)soft_cap;
  args.window = check_range(op, "window", window, 0, INT32_MAX);
  if (args.heads == 0 || args.kv_heads == 0 || args.heads % args.kv_heads != 0)
    refuse(op.name, ": query has ", args.heads, " heads, a multiple of the ", args.kv_heads, " kv heads of the pages",
           " expected");
  if (args.page_size == 0) refuse(op.name, ": the pages have page_size 0, at least 1 expected");
  if (!(soft_cap >= 0)) refuse(op.name, ": soft_cap is ", soft_cap, ", 0 (no cap) or more expected");
  if (sinks) {
    Argument extra(op, "sinks", *sinks);
    args.sinks = extra.shaped({args.heads}).of(ScalarType::Float).dense().data<float>();
  }
  return check_rows(op, args, pages);
}

int64_t check_group(const char* op, Format format, int64_t in_features, int64_t group) {
  if (format == Format::mxfp4 && (group != 32 || in_features % 32))
    refuse(op, ": group is ", group, " and there are ", in_features, " inputs; mxfp4 needs groups of 32 inputs");
  if (format == Format::mxfp4) return group;
  if (format != Format::int4 && format != Format::fp8) return 0;
  bool one_group = format == Format::fp8 && group == in_features;
  if (group < 1 || (group % 32 != 0 && !one_group))
    refuse(op, ": group is ", group, ", a multiple of 32", format == Format::fp8 ? " or all inputs" : "", " expected");
  return group;
}

void check_packed(const char* op, Argument& packed, Format format, int64_t out_features, int64_t in_features,
                  int64_t group) {
  static const char* names[] = {"float32", "bfloat16", "float16", "int8", "int4", "fp8", "mxfp4"};
  int64_t bytes = packed_bytes(format, out_features, in_features, group);
  packed.of(ScalarType::Byte).dense();
  if (packed.count() != bytes)
    refuse(op, ": packed has ", packed.count(), " bytes, ", bytes, " expected for ", names[(int)format], " of ",
           out_features, " outputs and ", in_features, " inputs");
}

}  // namespace localllm
