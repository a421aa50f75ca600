// The prefill attention ops: `prefill_attention`, built only for Hopper, and `prefill_attention_mma`. They check shapes,
// dtypes and strides; rows and page tables are device data and not checked.
#include "../../cpu/binding/checks.h"
#include "../attention/prefill.h"
#include "../device/counters.h"
#include "pages.h"
#include "stream.h"

namespace localllm::cuda {
namespace {

struct Inputs {
  Tensor &out, &query, &key_pages, &value_pages, &row_starts, &context_lens, &page_table;
  Optional& sinks;
  double scale, cap;
  int64_t window, min_queries, tiles;
};

// The arguments of both ops. `fp8`: the op supports a float8_e4m3fn cache. `max_group`: limit of query heads per kv head.
PrefillArgs prefill_arguments(const char* name, Inputs& in, bool fp8, int64_t max_group) {
  Op op(name, in.query);
  Argument to(op, "out", in.out), from(op, "query", in.query), keys(op, "key_pages", in.key_pages);
  Argument values(op, "value_pages", in.value_pages), starts(op, "row_starts", in.row_starts);
  Argument contexts(op, "context_lens", in.context_lens), pages(op, "page_table", in.page_table);
  from.shaped({ANY, ANY, ANY});
  to.shaped({from.size(0), from.size(1), from.size(2)}).of(from.type()).dense();
  PrefillArgs args{};
  args.e4m3 = fp8 && keys.type() == ScalarType::Float8_e4m3fn;
  keys.shaped({ANY, ANY, ANY, from.size(2)}).of(args.e4m3 ? keys.type() : from.type());
  values.shaped({keys.size(0), keys.size(1), keys.size(2), keys.size(3)}).of(keys.type());
  pages.shaped({ANY, ANY}).of(ScalarType::Int).dense_rows();
  starts.shaped({pages.size(0) + 1}).of(ScalarType::Int).dense();
  contexts.shaped({pages.size(0)}).of(ScalarType::Int).dense();
  refuse_heads(name, from);
  int64_t kv_heads = keys.size(2), size = keys.size(1);
  if (kv_heads < 1 || from.size(1) % kv_heads || from.size(1) > kv_heads * max_group)
    refuse(name, ": ", from.size(1), " heads for ", kv_heads, " kv heads");
  if (size < 1 || keys.size(0) * size > INT32_MAX) refuse(name, ": empty pages, or too many pages");
  if (in.query.stride(2) != 1 || in.query.stride(1) % 8 || in.query.stride(0) % 8)
    refuse(name, ": strides of query are not multiples of 8 elements");
  refuse_unaligned(name, in.out, "out");
  refuse_unaligned(name, in.query, "query");
  refuse_unaligned(name, in.key_pages, "key_pages");
  refuse_unaligned(name, in.value_pages, "value_pages");
  args.slot = slot_stride(name, in.key_pages, "key_pages");
  args.head = in.key_pages.stride(2);
  if (slot_stride(name, in.value_pages, "value_pages") != args.slot || in.value_pages.stride(2) != args.head)
    refuse(name, ": strides of value_pages and key_pages differ");
  args.type = from.number();
  args.dim = (int)from.size(2);
  args.out = to.data();
  args.query = from.data();
  args.keys = keys.data();
  args.values = values.data();
  args.row_starts = starts.data<int32_t>();
  args.context_lens = contexts.data<int32_t>();
  args.page_table = pages.data<int32_t>();
  args.table_row = pages.stride();
  args.query_token = in.query.stride(0);
  args.query_head = in.query.stride(1);
  if (in.sinks) {
    Argument scores(op, "sinks", *in.sinks);
    args.sinks = scores.shaped({from.size(1)}).of(ScalarType::Float).dense().data<float>();
  }
  args.tokens = (int)from.size(0);
  args.slots = (int)(keys.size(0) * size);
  args.page_size = (int)size;
  args.rows = (int)pages.size(0);
  args.columns = (int)pages.size(1);
  args.kv_heads = (int)kv_heads;
  args.group = (int)(from.size(1) / kv_heads);
  args.window = (int)check_range(op, "window", in.window, 0, INT32_MAX);
  args.min_queries = (int)check_range(op, "min_queries", in.min_queries, 1, INT32_MAX);
  args.tiles = check_range(op, "tiles", in.tiles, 0, INT32_MAX);
  args.scale = (float)in.scale;
  args.cap = (float)in.cap;
  return args;
}

bool empty(const PrefillArgs& args) { return args.tiles == 0 || args.rows == 0 || args.tokens == 0; }

// Does not compute rows with fewer than `min_queries` queries. `tiles`: lower bound of the number of tiles of the other
// rows.
void prefill_op(Tensor out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts, Tensor context_lens,
               Tensor page_table, Optional sinks, double scale, int64_t window, double cap, int64_t min_queries,
               int64_t tiles) {
  constexpr const char* OP = "prefill_attention";
  Inputs in{out, query, key_pages, value_pages, row_starts, context_lens, page_table, sinks, scale, cap, window,
            min_queries, tiles};
  PrefillArgs args = prefill_arguments(OP, in, false, PREFILL_TILE_ROWS);
  if (args.dim != 64 && args.dim != 128) refuse(OP, ": heads of 64 or 128 expected");
  if (!supports_pages(args.page_size)) refuse(OP, ": pages of ", args.page_size, " positions");
  if (empty(args)) return;
  Stream stream(query);
  args.claims = counters_of(stream).claims;
  prefill(args, stream);
}

// `tiles`: the number of tiles of `tile_rows` rows that all rows of the batch with at least `min_queries` queries have.
// Does not compute other rows.
void prefill_mma_op(Tensor out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts,
                   Tensor context_lens, Tensor page_table, Optional sinks, double scale, int64_t window, double cap,
                   int64_t min_queries, int64_t tile_rows, int64_t tiles) {
  constexpr const char* OP = "prefill_attention_mma";
  Inputs in{out, query, key_pages, value_pages, row_starts, context_lens, page_table, sinks, scale, cap, window,
            min_queries, tiles};
  PrefillArgs args = prefill_arguments(OP, in, true, tile_rows);
  if (!supports_tile(args.dim, tile_rows)) refuse(OP, ": tiles of ", tile_rows, " rows for heads of ", args.dim);
  if (args.page_size & (args.page_size - 1))
    refuse(OP, ": pages of ", args.page_size, " positions, a power of two expected");
  if (args.tiles * args.kv_heads > INT32_MAX) refuse(OP, ": too many tiles");
  if (args.e4m3 && (args.slot % 16 || args.head % 16))
    refuse(OP, ": strides of an fp8 cache are not multiples of 16 elements");
  if (args.slot > INT32_MAX || args.kv_heads * args.head > INT32_MAX) refuse(OP, ": slots are too large");
  while (1 << args.page_shift < args.page_size) args.page_shift++;
  if (!empty(args)) prefill_mma(args, (int)tile_rows, Stream(query));
}

}  // namespace

#ifdef LOCALLLM_HOPPER
STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  library.def(
      "prefill_attention(Tensor(a!) out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts, "
      "Tensor context_lens, Tensor page_table, Tensor? sinks, float scale, int window, float soft_cap, int "
      "min_queries, int tiles) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) { library.impl("prefill_attention", TORCH_BOX(&prefill_op)); }
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  library.def(
      "prefill_attention_mma(Tensor(a!) out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts, "
      "Tensor context_lens, Tensor page_table, Tensor? sinks, float scale, int window, float soft_cap, int "
      "min_queries, int tile_rows, int tiles) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) {
  library.impl("prefill_attention_mma", TORCH_BOX(&prefill_mma_op));
}

}  // namespace localllm::cuda
