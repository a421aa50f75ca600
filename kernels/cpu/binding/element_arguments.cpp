#include "element_arguments.h"

#include "checks.h"

namespace localllm {

NormArgs norm_arguments(const Op& op, const Tensor& out, const Tensor& x, const Tensor& weight, double eps,
                        double offset, const Tensor* residual) {
  Argument to(op, "out", out), from(op, "x", x), scale(op, "weight", weight);
  if (from.dims() == 3) {
    from.shaped({ANY, ANY, ANY});
    to.shaped({from.size(0), from.size(1), from.size(2)});
  } else {
    from.shaped({ANY, ANY});
    to.shaped({from.size(0), from.size(1)});
  }
  int64_t dim = from.size(from.dims() - 1);
  from.dense_rows();
  to.written_rows();
  scale.shaped({dim}).dense();
  if (to.number() != from.number()) refuse(op.name, ": out and x are of different types");
  NormArgs args{};
  args.out = to.data();
  args.x = from.data();
  args.weight = scale.data();
  args.type = from.number();
  args.weight_type = scale.number();
  args.rows = from.size(0);
  args.heads = from.dims() == 3 ? from.size(1) : 1;
  args.dim = dim;
  args.x_stride = from.stride();
  args.out_stride = to.stride();
  args.eps = (float)eps;
  args.offset = (float)offset;
  if (residual) {
    Argument sum(op, "residual", *residual);
    if (sum.shaped({args.rows, dim}).dense().number() != args.type)
      refuse(op.name, ": residual and x are of different types");
    args.residual = sum.data();
  }
  return args;
}

ActivationArgs gate_arguments(const Op& op, const Tensor& out, const Tensor& x, int64_t kind) {
  Argument to(op, "out", out), from(op, "x", x);
  to.shaped({ANY, ANY}).written_rows();
  from.shaped({to.size(0), 2 * to.size(1)}).dense_rows();
  if (to.number() != from.number()) refuse(op.name, ": out and x are of different types");
  return {to.data(),  from.data(), from.number(), (Activation)check_range(op, "kind", kind, 0, 2),
          to.size(0), to.size(1),  from.stride(), to.stride()};
}

RopeArgs rope_arguments(const Op& op, const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t rotation) {
  Argument rotated(op, "x", x), cosines(op, "cos", cos), sines(op, "sin", sin);
  rotated.shaped({ANY, ANY, ANY}).written_rows();
  int64_t half = rotation_half(op, cosines, sines, rotated.size(0), rotated.size(2));
  return {rotated.data(), rotated.number(), cosines.data<float>(), sines.data<float>(),
          (Rotation)check_range(op, "rotation", rotation, 0, 1), rotated.size(0), rotated.size(1), rotated.size(2),
          half, rotated.stride()};
}

StoreArgs store_arguments(const Op& op, const Tensor& key, const Tensor& value, const Tensor& key_pages,
                          const Tensor& value_pages, const Tensor& slots) {
  Argument k(op, "key", key), v(op, "value", value), slot_ids(op, "slots", slots);
  Argument keys(op, "key_pages", key_pages), values(op, "value_pages", value_pages);
  k.shaped({ANY, ANY, ANY}).dense_rows();
  v.shaped({k.size(0), k.size(1), k.size(2)}).dense_rows();
  if (k.number() != v.number()) refuse(op.name, ": key and value are of different types");
  int64_t limit = cache_slots(op, keys, values, k.size(1), k.size(2));
  slot_ids.shaped({k.size(0)}).of(ScalarType::Long).below(limit);
  CacheType cache = cache_type(op, keys);
  return {k.data(), v.data(), keys.data(), values.data(), k.number(), cache.type, slot_ids.data<int64_t>(), k.size(0),
          k.size(1) * k.size(2), k.stride(), v.stride(), limit, cache.e4m3};
}

AppendArgs append_arguments(const Op& op, const Tensor& qkv, const Tensor* query_norm, const Tensor* key_norm,
                            double eps, double offset, const Tensor& cos, const Tensor& sin, int64_t rotation,
                            const Tensor& slots, const Tensor& key_pages, const Tensor& value_pages) {
  Argument x(op, "qkv", qkv), slot_ids(op, "slots", slots), cosines(op, "cos", cos), sines(op, "sin", sin);
  Argument keys(op, "key_pages", key_pages), values(op, "value_pages", value_pages);
  x.shaped({ANY, ANY, ANY}).written_rows();
  AppendArgs args{};
  args.limit = cache_slots(op, keys, values, ANY, x.size(2));
  slot_ids.shaped({x.size(0)}).of(ScalarType::Long).below(args.limit);
  CacheType cache = cache_type(op, keys);
  args.qkv = x.data();
  args.type = x.number();
  args.cache_type = cache.type;
  args.cache_e4m3 = cache.e4m3;
  args.half = rotation_half(op, cosines, sines, x.size(0), x.size(2));
  args.cos = cosines.data<float>();
  args.sin = sines.data<float>();
  args.rotation = (Rotation)check_range(op, "rotation", rotation, 0, 1);
  args.slots = slot_ids.data<int64_t>();
  args.key_pages = keys.data();
  args.value_pages = values.data();
  args.tokens = x.size(0);
  args.kv_heads = keys.size(2);
  args.dim = x.size(2);
  args.stride = x.stride();
  args.heads = x.size(1) - 2 * args.kv_heads;
  if (args.heads < 0)
    refuse(op.name, ": qkv has ", x.size(1), " heads, at least ", 2 * args.kv_heads, " (keys and values) expected");
  args.eps = (float)eps;
  args.offset = (float)offset;
  head_norms(op, args, query_norm, key_norm);
  return args;
}

EmbeddingArgs embedding_arguments(const Op& op, const Tensor& out, const Tensor& tokens, const Tensor& weight,
                                  double scale) {
  Argument to(op, "out", out), ids(op, "tokens", tokens), table(op, "weight", weight);
  table.shaped({ANY, ANY}).dense();
  ids.shaped({ANY}).of(ScalarType::Int).below(table.size(0));
  to.shaped({ids.size(0), table.size(1)}).dense();
  return {to.data(), ids.data<int32_t>(), table.data(), to.number(), table.number(),
          ids.size(0), table.size(0), table.size(1), (float)scale};
}

CopyPagesArgs copy_pages_arguments(const Op& op, const Tensor& pages, const Tensor& sources, const Tensor& targets) {
  Argument page_data(op, "pages", pages), from(op, "sources", sources), to(op, "targets", targets);
  if (page_data.dims() == 0) refuse(op.name, ": pages has no dimensions");
  page_data.dense();
  from.shaped({ANY}).of(ScalarType::Long).below(page_data.size(0));
  to.shaped({from.size(0)}).of(ScalarType::Long).below(page_data.size(0));
  int64_t page_bytes = page_data.size(0) ? page_data.count() / page_data.size(0) * page_data.bytes() : 0;
  return {page_data.data(), from.data<int64_t>(), to.data<int64_t>(), from.size(0), page_bytes, nullptr,
          page_data.size(0)};
}

}  // namespace localllm
