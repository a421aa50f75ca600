// The prefill attention op, built only for Hopper. It checks shapes, dtypes and strides; rows and page tables are
// device data and not checked.
#include "../cpu/checks.h"
#include "attention_extend.h"
#include "counters.h"
#include "pages.h"
#include "queue.h"

namespace localllm::cuda {
namespace {

constexpr const char* OP = "extend_attention";

// Does not compute rows with fewer than `min_queries` queries. `tiles`: lower bound of the number of tiles of the other
// rows.
void extend_op(Tensor out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts, Tensor context_lens,
               Tensor page_table, Optional sinks, double scale, int64_t window, double cap, int64_t min_queries,
               int64_t tiles) {
  Op op(OP, query);
  Argument to(op, "out", out), from(op, "query", query), keys(op, "key_pages", key_pages);
  Argument values(op, "value_pages", value_pages), starts(op, "row_starts", row_starts);
  Argument contexts(op, "context_lens", context_lens), pages(op, "page_table", page_table);
  from.shaped({ANY, ANY, ANY});
  to.shaped({from.size(0), from.size(1), from.size(2)}).of(from.type()).dense();
  keys.shaped({ANY, ANY, ANY, from.size(2)}).of(from.type());
  values.shaped({keys.size(0), keys.size(1), keys.size(2), keys.size(3)}).of(from.type());
  pages.shaped({ANY, ANY}).of(ScalarType::Int).dense_rows();
  starts.shaped({pages.size(0) + 1}).of(ScalarType::Int).dense();
  contexts.shaped({pages.size(0)}).of(ScalarType::Int).dense();
  ExtendArgs args{};
  args.type = from.number();
  args.dim = (int)from.size(2);
  if (args.type == Type::f32 || (args.dim != 64 && args.dim != 128)) refuse(OP, ": 16-bit heads of 64 or 128 expected");
  int64_t kv_heads = keys.size(2), size = keys.size(1);
  if (kv_heads < 1 || from.size(1) % kv_heads || from.size(1) > kv_heads * EXTEND_TILE_ROWS)
    refuse(OP, ": ", from.size(1), " heads for ", kv_heads, " kv heads");
  if (!extends_pages(size)) refuse(OP, ": pages of ", size, " positions");
  if (keys.size(0) * size > INT32_MAX) refuse(OP, ": too many pages");
  if (query.stride(2) != 1 || query.stride(1) % 8 || query.stride(0) % 8)
    refuse(OP, ": strides of query are not multiples of 8 elements");
  refuse_unaligned(OP, out, "out");
  refuse_unaligned(OP, query, "query");
  refuse_unaligned(OP, key_pages, "key_pages");
  refuse_unaligned(OP, value_pages, "value_pages");
  args.slot = slot_stride(OP, key_pages, "key_pages");
  args.head = key_pages.stride(2);
  if (slot_stride(OP, value_pages, "value_pages") != args.slot || value_pages.stride(2) != args.head)
    refuse(OP, ": strides of value_pages and key_pages differ");
  args.out = to.data();
  args.query = from.data();
  args.keys = keys.data();
  args.values = values.data();
  args.row_starts = starts.data<int32_t>();
  args.context_lens = contexts.data<int32_t>();
  args.page_table = pages.data<int32_t>();
  args.table_row = pages.stride();
  args.query_token = query.stride(0);
  args.query_head = query.stride(1);
  if (sinks) {
    Argument scores(op, "sinks", *sinks);
    args.sinks = scores.shaped({from.size(1)}).of(ScalarType::Float).dense().data<float>();
  }
  args.tokens = (int)from.size(0);
  args.slots = (int)(keys.size(0) * size);
  args.page_size = (int)size;
  args.rows = (int)pages.size(0);
  args.columns = (int)pages.size(1);
  args.kv_heads = (int)kv_heads;
  args.group = (int)(from.size(1) / kv_heads);
  args.window = (int)check_range(op, "window", window, 0, INT32_MAX);
  args.min_queries = (int)check_range(op, "min_queries", min_queries, 1, INT32_MAX);
  args.tiles = check_range(op, "tiles", tiles, 0, INT32_MAX);
  args.scale = (float)scale;
  args.cap = (float)cap;
  if (args.tiles == 0 || args.rows == 0 || args.tokens == 0) return;
  Queue queue(query);
  args.claims = counters_of(queue).claims;
  extend(args, queue);
}

}  // namespace

#ifdef LOCALLLM_HOPPER
STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  library.def(
      "extend_attention(Tensor(a!) out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts, "
      "Tensor context_lens, Tensor page_table, Tensor? sinks, float scale, int window, float soft_cap, int "
      "min_queries, "
      "int tiles) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) { library.impl("extend_attention", TORCH_BOX(&extend_op)); }
#endif

}  // namespace localllm::cuda
