// The decode attention op. It checks shapes, dtypes and strides; rows and page tables are device data and not checked.
#include "../../cpu/binding/checks.h"
#include "../attention/decode.h"
#include "pages.h"
#include "stream.h"

namespace localllm::cuda {
namespace {

constexpr const char* OP = "decode_attention";

void decode_op(Tensor out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts, Tensor context_lens,
               Tensor page_table, Optional sinks, double scale, int64_t window, double cap) {
  Op op(OP, query);
  Argument to(op, "out", out), from(op, "query", query), keys(op, "key_pages", key_pages);
  Argument values(op, "value_pages", value_pages), starts(op, "row_starts", row_starts);
  Argument contexts(op, "context_lens", context_lens), pages(op, "page_table", page_table);
  from.shaped({ANY, ANY, ANY});
  to.shaped({from.size(0), from.size(1), from.size(2)}).of(from.type()).dense();
  bool e4m3 = keys.type() == ScalarType::Float8_e4m3fn;
  keys.shaped({ANY, ANY, ANY, from.size(2)}).of(e4m3 ? keys.type() : from.type());
  values.shaped({keys.size(0), keys.size(1), keys.size(2), keys.size(3)}).of(keys.type());
  pages.shaped({ANY, ANY}).of(ScalarType::Int).dense_rows();
  starts.shaped({pages.size(0) + 1}).of(ScalarType::Int).dense();
  contexts.shaped({pages.size(0)}).of(ScalarType::Int).dense();
  DecodeArgs args{};
  args.type = from.number();
  args.e4m3 = e4m3;
  args.dim = (int)from.size(2);
  refuse_heads(OP, from);
  int64_t kv_heads = keys.size(2), size = keys.size(1), rows = pages.size(0);
  if (kv_heads < 1 || from.size(1) % kv_heads || from.size(1) > kv_heads * MAX_GROUP)
    refuse(OP, ": ", from.size(1), " heads for ", kv_heads, " kv heads");
  if (size < 1 || size & (size - 1)) refuse(OP, ": pages of ", size, " positions, a power of two expected");
  if (rows * kv_heads > MAX_PAIRS || keys.size(0) * size > INT32_MAX) refuse(OP, ": too many rows or pages");
  if (query.stride(2) != 1 || query.stride(1) % 8 || query.stride(0) % 8)
    refuse(OP, ": strides of query are not multiples of 8 elements");
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
  args.columns = (int)pages.size(1);
  args.pages = (int)keys.size(0);
  args.query_token = query.stride(0);
  args.query_head = query.stride(1);
  if (sinks) {
    Argument scores(op, "sinks", *sinks);
    args.sinks = scores.shaped({from.size(1)}).of(ScalarType::Float).dense().data<float>();
  }
  args.rows = (int)rows;
  args.kv_heads = (int)kv_heads;
  args.group = (int)(from.size(1) / kv_heads);
  args.window = (int)check_range(op, "window", window, 0, INT32_MAX);
  while (int64_t{1} << args.page_shift < size) args.page_shift++;
  args.scale = (float)scale;
  args.cap = (float)cap;
  if (rows == 0) return;
  Stream stream(query);
  args.arrivals = counters_of(stream).arrivals;
  args.chunks = decode_chunks(rows, kv_heads, args.dim, e4m3);
  int64_t places = int64_t{2} * args.chunks * from.size(1);  // 2: see DecodeArgs::partial
  const int padded = padded_dim(args.dim);
  Tensor shared = torch::stable::new_empty(query, {places * (padded + 2)}, ScalarType::Float);
  args.partial = static_cast<float*>(shared.data_ptr());
  args.stats = args.partial + places * padded;
  decode(args, stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(localllm, library) {
  library.def(
      "decode_attention(Tensor(a!) out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts, "
      "Tensor context_lens, Tensor page_table, Tensor? sinks, float scale, int window, float soft_cap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CUDA, library) { library.impl("decode_attention", TORCH_BOX(&decode_op)); }

}  // namespace localllm::cuda
