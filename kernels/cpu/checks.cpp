#include "checks.h"

namespace localllm {

int64_t cast(const char* op, const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) refuse(op, ": ", name, " is ", value, ", ", least, " to ", most, " expected");
  return value;
}

int64_t cache_slots(const char* op, Argument& keys, Argument& values, int64_t kv_heads, int64_t dim) {
  keys.shaped({ANY, ANY, kv_heads, dim}).dense();
  values.shaped({keys.size(0), keys.size(1), keys.size(2), keys.size(3)}).dense();
  if (keys.number() != values.number()) refuse(op, ": key_pages and value_pages are of different types");
  return keys.size(0) * keys.size(1);
}

int64_t check_rows(const AttentionArgs& args, int64_t pages) {
  if (args.row_starts[0] != 0 || args.row_starts[args.rows] != args.tokens)
    refuse("attention: row_starts goes from ", args.row_starts[0], " to ", args.row_starts[args.rows], ", 0 to ",
           args.tokens, " (the tokens of query) expected");
  int64_t positions = 0;
  for (int64_t row = 0; row < args.rows; row++) {
    int64_t queries = (int64_t)args.row_starts[row + 1] - args.row_starts[row], context = args.context_lens[row];
    if (queries < 0) refuse("attention: row_starts goes down after row ", row);
    if (queries == 0) continue;
    if (context < queries || context > args.pages_per_row * args.page_size)
      refuse("attention: context_lens[", row, "] is ", context, ", ", queries, " (its own tokens) to ",
             args.pages_per_row * args.page_size, " (its pages) expected");
    int64_t first = args.window ? context - queries - args.window + 1 : 0;
    first = first > 0 ? first : 0;
    positions += context - first;
    const int32_t* table = args.page_table + row * args.pages_per_row;
    for (int64_t page = first / args.page_size; page * args.page_size < context; page++)
      if (table[page] < 0 || table[page] >= pages)
        refuse("attention: page_table[", row, ", ", page, "] is ", table[page], ", 0 to ", pages - 1, " expected");
  }
  return positions;
}

int64_t check_group(const char* op, Format format, int64_t ins, int64_t group) {
  if (format != Format::int4 && format != Format::fp8) return 0;
  bool whole = format == Format::fp8 && group == ins;
  if (group < 1 || (group % 32 != 0 && !whole))
    refuse(op, ": group is ", group, ", a multiple of 32", format == Format::fp8 ? " or all inputs" : "", " expected");
  return group;
}

void check_packed(const char* op, Argument& packed, Format format, int64_t outs, int64_t ins, int64_t group) {
  static const char* names[] = {"float32", "bfloat16", "float16", "int8", "int4", "fp8"};
  int64_t bytes = packed_bytes(format, outs, ins, group);
  packed.of(ScalarType::Byte).dense();
  if (packed.count() != bytes)
    refuse(op, ": packed has ", packed.count(), " bytes, ", bytes, " expected for ", names[(int)format], " of ", outs,
           " outputs and ", ins, " inputs");
}

}  // namespace localllm
