// The CPU ops. Each op checks its arguments on the calling thread; the kernels do not check them again.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <string>

#include "checks.h"
#include "../isa/dispatch.h"
#include "element_arguments.h"
#include "lora_arguments.h"
#include "../team/memory.h"
#include "../team/team.h"

namespace localllm {
namespace ops {
namespace {

using Optional = std::optional<Tensor>;

// Runs a kernel without shared memory.
template <class Args>
void run(void (*kernel)(const Args&, const Worker&), const Args& args, int64_t bytes) {
  Run(bytes).all(kernel, args);
}

// Runs a kernel with shared memory, whose size depends on the number of workers.
template <class Args>
void run(void (*kernel)(const Args&, const Worker&), size_t (*shared)(const Args&, int), Args& args, int64_t bytes) {
  Run run(bytes);
  args.shared = run.shared(shared(args, run.workers()));
  run.all(kernel, args);
}

int64_t bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

int64_t norm_bytes(const NormArgs& args) { return 2 * args.rows * args.heads * args.dim * bytes_of(args.type); }

void rms_norm(Tensor out, Tensor x, Tensor weight, double eps, double offset) {
  NormArgs args = norm_arguments("rms_norm", out, x, weight, eps, offset, nullptr);
  run(variant().rms_norm, args, norm_bytes(args));
}

void add_rms_norm(Tensor out, Tensor x, Tensor residual, Tensor weight, double eps, double offset) {
  NormArgs args = norm_arguments("add_rms_norm", out, x, weight, eps, offset, &residual);
  run(variant().rms_norm, args, 2 * norm_bytes(args));
}

void gate(Tensor out, Tensor x, int64_t kind) {
  ActivationArgs args = gate_arguments("gate", out, x, kind);
  run(variant().gate, args, 3 * args.rows * args.dim * bytes_of(args.type));
}

void rope(Tensor x, Tensor cos, Tensor sin, int64_t rotation) {
  RopeArgs args = rope_arguments("rope", x, cos, sin, rotation);
  run(variant().rope, args, 2 * args.tokens * args.heads * args.dim * bytes_of(args.type));
}

void store(Tensor key, Tensor value, Tensor key_pages, Tensor value_pages, Tensor slots) {
  StoreArgs args = store_arguments("store", key, value, key_pages, value_pages, slots);
  run(variant().store, args, 4 * args.tokens * args.width * bytes_of(args.type));
}

void copy_pages(Tensor pages, Tensor sources, Tensor targets) {
  CopyPagesArgs args = copy_pages_arguments("copy_pages", pages, sources, targets);
  if (args.copies == 0) return;
  Run run(2 * args.copies * args.page_bytes);
  args.shared = run.shared(args.copies * args.page_bytes);
  run.all(variant().copy_pages, args);
}

void append(Tensor qkv, Optional query_norm, Optional key_norm, double eps, double offset, Tensor cos, Tensor sin,
            int64_t rotation, Tensor slots, Tensor key_pages, Tensor value_pages) {
  AppendArgs args = append_arguments("append", qkv, query_norm ? &*query_norm : nullptr,
                                     key_norm ? &*key_norm : nullptr, eps, offset, cos, sin, rotation, slots, key_pages,
                                     value_pages);
  run(variant().append, args, 2 * args.tokens * (args.heads + 2 * args.kv_heads) * args.dim * bytes_of(args.type));
}

// The arguments of attention that these tensors determine. keys: [pages, page_size, kv_heads, dim].
AttentionArgs attention_arguments(const Op& op, Argument& out, Argument& query, const Argument& keys,
                                  int64_t value_dim) {
  query.dense_rows();
  out.shaped({query.size(0), query.size(1), value_dim}).dense();
  if (out.number() != query.number()) refuse(op.name, ": out and query are of different types");
  AttentionArgs args{};
  args.out = out.data();
  args.query = query.data();
  args.type = query.number();
  args.cache_type = keys.number();
  args.key_pages = keys.data();
  args.tokens = query.size(0);
  args.heads = query.size(1);
  args.kv_heads = keys.size(2);
  args.dim = query.size(2);
  args.value_dim = value_dim;
  args.query_stride = query.stride();
  args.page_size = keys.size(1);
  return args;
}

void attention(Tensor out, Tensor query, Tensor key_pages, Tensor value_pages, Tensor row_starts, Tensor context_lens,
               Tensor page_table, Optional sinks, double scale, int64_t window, double soft_cap) {
  Argument q("attention", "query", query), to("attention", "out", out);
  Argument keys("attention", "key_pages", key_pages), values("attention", "value_pages", value_pages);
  int64_t dim = q.shaped({ANY, ANY, ANY}).size(2);
  cache_slots("attention", keys, values, ANY, dim);
  AttentionArgs args = attention_arguments("attention", to, q, keys, dim);
  args.value_pages = values.data();
  int64_t positions = attention_rows("attention", args, keys.size(0), row_starts, context_lens, page_table, sinks,
                                     scale, window, soft_cap);
  if (args.tokens == 0) return;
  run(variant().attention, variant().attention_shared, args,
      positions * args.kv_heads * args.dim * 2 * keys.bytes() + 2 * to.count() * to.bytes());
}

void latent_attention(Tensor out, Tensor query, Tensor pages, Tensor row_starts, Tensor context_lens,
                      Tensor page_table, double scale, int64_t start) {
  Argument q("latent_attention", "query", query), to("latent_attention", "out", out);
  Argument keys("latent_attention", "pages", pages);
  int64_t dim = q.shaped({ANY, ANY, ANY}).size(2);
  check_range("latent_attention", "start", start, 0, dim - 1);
  keys.shaped({ANY, ANY, 1, dim}).dense();
  AttentionArgs args = attention_arguments("latent_attention", to, q, keys, dim - start);
  args.value_pages = keys.data<char>() + start * keys.bytes();
  int64_t positions = attention_rows("latent_attention", args, keys.size(0), row_starts, context_lens, page_table,
                                     std::nullopt, scale, 0, 0.0);
  if (args.tokens == 0) return;
  run(variant().attention, variant().attention_shared, args,
      positions * args.dim * keys.bytes() + 2 * to.count() * to.bytes());
}

void pack(Tensor packed, Tensor data, Optional scales, Optional zeros, int64_t kind, int64_t group) {
  static const ScalarType types[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                     ScalarType::Char, ScalarType::Byte, ScalarType::Float8_e4m3fn, ScalarType::Byte};
  static const ScalarType scale_types[] = {ScalarType::Float, ScalarType::Float, ScalarType::Float, ScalarType::Float,
                                           ScalarType::Half, ScalarType::Float, ScalarType::Byte};
  Argument to("pack", "packed", packed), from("pack", "data", data);
  Format format = (Format)check_range("pack", "format", kind, 0, FORMATS - 1);
  from.shaped({ANY, ANY}).of(types[kind]).dense();
  int64_t out_features = from.size(0), in_features = from.size(1) * (format == Format::int4 || format == Format::mxfp4 ? 2 : 1);
  PackArgs args{};
  args.packed = to.data();
  args.data = from.data();
  args.format = format;
  args.out_features = out_features;
  args.in_features = in_features;
  args.group = check_group("pack", format, in_features, group);
  check_packed("pack", to, format, out_features, in_features, args.group);
  bool quantised = format >= Format::int8;
  if (quantised != scales.has_value())
    refuse("pack: scales are ", quantised ? "missing" : "for quantised weights only");
  if ((format == Format::int4) != zeros.has_value())
    refuse("pack: zeros are ", format == Format::int4 ? "missing" : "for int4 only");
  int64_t groups = args.group ? (in_features + args.group - 1) / args.group : 0;
  if (scales) {
    Argument argument("pack", "scales", *scales);
    if (format == Format::int8) argument.shaped({out_features});
    else argument.shaped({out_features, groups});
    args.scales = argument.of(scale_types[kind]).dense().data();
  }
  if (zeros) {
    Argument argument("pack", "zeros", *zeros);
    args.zeros = argument.shaped({out_features, groups}).of(ScalarType::Byte).dense().data<uint8_t>();
  }
  run(variant().pack, args, to.count());
}

void linear(Tensor out, Tensor x, Tensor packed, Optional bias, int64_t kind, int64_t in_features, int64_t group,
            bool wide) {
  Argument to("linear", "out", out), from("linear", "x", x), weight("linear", "packed", packed);
  Format format = (Format)check_range("linear", "format", kind, 0, FORMATS - 1);
  from.shaped({ANY, check_range("linear", "in_features", in_features, 0, INT32_MAX)}).dense_rows();
  to.shaped({from.size(0), ANY}).written_rows();
  LinearArgs args{};
  args.group = check_group("linear", format, in_features, group);
  check_packed("linear", weight, format, to.size(1), in_features, args.group);
  args.out = to.data();
  args.x = from.data();
  args.weight = weight.data();
  args.out_type = to.number();
  args.x_type = from.number();
  args.format = format;
  args.rows = to.size(0);
  args.out_features = to.size(1);
  args.in_features = in_features;
  args.x_stride = from.stride();
  args.out_stride = to.stride();
  args.wide = wide;
  if (wide && format != Format::int4) refuse("linear: wide is for int4 only");
  if (bias) {
    Argument shift("linear", "bias", *bias);
    args.bias = shift.shaped({args.out_features}).of(ScalarType::Float).dense().data<float>();
  }
  if (args.rows == 0 || args.out_features == 0) return;
  run(variant().linear, variant().linear_shared, args, weight.count() + from.count() * from.bytes());
}

void embedding(Tensor out, Tensor tokens, Tensor weight, double scale) {
  EmbeddingArgs args = embedding_arguments("embedding", out, tokens, weight, scale);
  run(variant().embedding, args, 2 * args.count * args.dim * bytes_of(args.type));
}

struct LoraCall {
  LoraArgs args;
  void (*inner)(const LoraArgs&, const Worker&);
  void (*expand)(const LoraArgs&, const Worker&);
};

void lora_on_variant(const LoraCall& call, const Worker& worker) {
  call.inner(call.args, worker);
  worker.barrier();
  call.expand(call.args, worker);
}

void run_lora(LoraCall& call, int64_t tokens, int64_t factor_bytes) {
  if (call.args.tiles == 0) return;
  Run run(call.args.tiles * factor_bytes);
  call.args.inner = (float*)run.shared(lora_inner(call.args, tokens) * sizeof(float));
  run.all(lora_on_variant, call);
}

void lora_add(Tensor out, Tensor x, Tensor a, Tensor b, std::vector<int64_t> widths, Tensor scales, Tensor order,
              Tensor starts, Tensor tile_slots) {
  Argument to("lora_add", "out", out), from("lora_add", "x", x);
  LoraCall call{lora_factors("lora_add", a, b, widths), variant().lora_shrink, variant().lora_expand};
  LoraArgs& args = call.args;
  from.shaped({ANY, args.in_features}).dense_rows();
  to.shaped({from.size(0), b.size(1)}).written_rows();
  if (from.number() != args.type) refuse("lora_add: x and lora_a are of different types");
  lora_tiles("lora_add", args, a.size(0), to.size(0), scales, order, starts, tile_slots);
  args.out = to.data();
  args.x = from.data();
  args.out_type = to.number();
  args.x_stride = from.stride();
  args.out_stride = to.stride();
  run_lora(call, to.size(0), (a.size(1) * a.size(2) + b.size(1) * b.size(2)) * bytes_of(args.type));
}

void lora_embedding(Tensor out, Tensor tokens, Tensor a, Tensor b, std::vector<int64_t> widths, Tensor scales,
                    Tensor order, Tensor starts, Tensor tile_slots) {
  Argument to("lora_embedding", "out", out), ids("lora_embedding", "tokens", tokens);
  LoraCall call{lora_factors("lora_embedding", a, b, widths), variant().lora_look_up, variant().lora_expand};
  LoraArgs& args = call.args;
  check_range("lora_embedding", "the number of slices", args.slices, 1, 1);
  ids.shaped({ANY}).of(ScalarType::Int).below(args.in_features);
  to.shaped({ids.size(0), b.size(1)}).written_rows();
  lora_tiles("lora_embedding", args, a.size(0), to.size(0), scales, order, starts, tile_slots);
  args.out = to.data();
  args.ids = ids.data<int32_t>();
  args.out_type = to.number();
  args.out_stride = to.stride();
  run_lora(call, to.size(0), b.size(1) * b.size(2) * bytes_of(args.type));
}

// Checks logits: [rows, vocab] float32, vocab >= 1.
Argument& check_logits(const char* op, Argument& logits) {
  logits.shaped({ANY, ANY}).of(ScalarType::Float).dense_rows();
  if (logits.size(1) == 0) refuse(op, ": logits has 0 columns, at least 1 (the vocabulary) expected");
  return logits;
}

void greedy(Tensor tokens, Tensor logits) {
  Argument x("greedy", "logits", logits), to("greedy", "tokens", tokens);
  check_logits("greedy", x);
  GreedyArgs args{to.shaped({x.size(0)}).of(ScalarType::Long).dense().data<int64_t>(), x.data<float>(), x.size(0),
                  x.size(1), x.stride(), nullptr};
  run(variant().greedy, variant().greedy_shared, args, x.count() * 4);
}

void draw(Tensor tokens, Tensor logits, Tensor temperature, Tensor seed_low, Tensor seed_high, Tensor position,
          Optional top_k, Optional top_p, Optional min_p) {
  Argument x("draw", "logits", logits), to("draw", "tokens", tokens);
  check_logits("draw", x);
  int64_t rows = x.size(0);
  auto per_row = [rows](const char* name, const Tensor& tensor, ScalarType type) {
    Argument argument("draw", name, tensor);
    return argument.shaped({rows}).of(type).dense().data();
  };
  DrawArgs args{};
  args.tokens = to.shaped({rows}).of(ScalarType::Long).dense().data<int64_t>();
  args.logits = x.data<float>();
  args.temperature = (const float*)per_row("temperature", temperature, ScalarType::Float);
  args.seed_low = (const int32_t*)per_row("seed_low", seed_low, ScalarType::Int);
  args.seed_high = (const int32_t*)per_row("seed_high", seed_high, ScalarType::Int);
  args.position = (const int32_t*)per_row("position", position, ScalarType::Int);
  if (top_k) args.top_k = (const int32_t*)per_row("top_k", *top_k, ScalarType::Int);
  if (top_p) args.top_p = (const float*)per_row("top_p", *top_p, ScalarType::Float);
  if (min_p) args.min_p = (const float*)per_row("min_p", *min_p, ScalarType::Float);
  args.rows = rows;
  args.vocab = x.size(1);
  args.stride = x.stride();
  run(variant().draw, variant().draw_shared, args, x.count() * 4);
}

void mask(Tensor logits, Tensor rows, Tensor words) {
  Argument x("mask", "logits", logits), row_ids("mask", "rows", rows), bits("mask", "words", words);
  check_logits("mask", x).written_rows();
  row_ids.shaped({ANY}).of(ScalarType::Long).below(x.size(0));
  bits.shaped({row_ids.size(0), (x.size(1) + 31) / 32}).of(ScalarType::Int).dense();
  MaskArgs args{x.data<float>(), row_ids.data<int64_t>(), bits.data<int32_t>(), row_ids.size(0),
                bits.size(1), x.size(1), x.stride()};
  run(variant().mask, args, args.count * args.vocab * 4);
}

void logprob(Tensor out, Tensor normaliser, Tensor logits, Tensor tokens) {
  Argument x("logprob", "logits", logits), ids("logprob", "tokens", tokens);
  Argument to("logprob", "out", out), sums("logprob", "normaliser", normaliser);
  check_logits("logprob", x);
  ids.shaped({x.size(0)}).of(ScalarType::Long).below(x.size(1));
  LogprobArgs args{to.shaped({x.size(0)}).of(ScalarType::Float).dense().data<float>(),
                   sums.shaped({x.size(0)}).of(ScalarType::Float).dense().data<float>(),
                   x.data<float>(), ids.data<int64_t>(), x.size(0), x.size(1), x.stride(), nullptr};
  run(variant().logprob, variant().logprob_shared, args, x.count() * 4);
}

void first_touch(Tensor fresh, int64_t unit) {
  Argument memory("first_touch", "fresh", fresh);
  memory.dense();
  if (unit < 1) refuse("first_touch: unit is ", unit, ", at least 1 expected");
  int64_t bytes = memory.count() * memory.bytes();
  localllm::advise_huge(memory.data(), bytes);
  Run run(INT64_MAX);
  run.all(localllm::first_touch, TouchArgs{(char*)memory.data(), bytes, unit});
}

std::string variants() {
  std::string names;
  for (const std::string& name : usable_variants()) names += (names.empty() ? "" : " ") + name;
  return names;
}

std::string use_variant(std::string name) { return localllm::use_variant(name); }

int64_t threads() { return localllm::threads(); }

int64_t use_threads(int64_t count) {
  return localllm::use_threads((int)check_range("use_threads", "count", count, 0, 1024));
}

int64_t share_from(int64_t bytes) {
  return localllm::share_from(check_range("share_from", "bytes", bytes, 0, INT64_MAX));
}

int64_t packed_bytes(int64_t format, int64_t out_features, int64_t in_features, int64_t group) {
  Format weight_format = (Format)check_range("packed_bytes", "format", format, 0, FORMATS - 1);
  check_range("packed_bytes", "out_features", out_features, 0, INT32_MAX);
  check_range("packed_bytes", "in_features", in_features, 0, INT32_MAX);
  return localllm::packed_bytes(weight_format, out_features, in_features,
                                check_group("packed_bytes", weight_format, in_features, group));
}

}  // namespace
}  // namespace ops

STABLE_TORCH_LIBRARY_IMPL(localllm, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&ops::rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&ops::add_rms_norm));
  library.impl("gate", TORCH_BOX(&ops::gate));
  library.impl("rope", TORCH_BOX(&ops::rope));
  library.impl("store", TORCH_BOX(&ops::store));
  library.impl("copy_pages", TORCH_BOX(&ops::copy_pages));
  library.impl("append", TORCH_BOX(&ops::append));
  library.impl("attention", TORCH_BOX(&ops::attention));
  library.impl("latent_attention", TORCH_BOX(&ops::latent_attention));
  library.impl("pack", TORCH_BOX(&ops::pack));
  library.impl("linear", TORCH_BOX(&ops::linear));
  library.impl("embedding", TORCH_BOX(&ops::embedding));
  library.impl("lora_add", TORCH_BOX(&ops::lora_add));
  library.impl("lora_embedding", TORCH_BOX(&ops::lora_embedding));
  library.impl("greedy", TORCH_BOX(&ops::greedy));
  library.impl("draw", TORCH_BOX(&ops::draw));
  library.impl("mask", TORCH_BOX(&ops::mask));
  library.impl("logprob", TORCH_BOX(&ops::logprob));
  library.impl("first_touch", TORCH_BOX(&ops::first_touch));
}

STABLE_TORCH_LIBRARY_IMPL(localllm, CompositeExplicitAutograd, library) {  // ops without tensors have no device
  library.impl("variants", TORCH_BOX(&ops::variants));
  library.impl("use_variant", TORCH_BOX(&ops::use_variant));
  library.impl("threads", TORCH_BOX(&ops::threads));
  library.impl("use_threads", TORCH_BOX(&ops::use_threads));
  library.impl("share_from", TORCH_BOX(&ops::share_from));
  library.impl("packed_bytes", TORCH_BOX(&ops::packed_bytes));
}

}  // namespace localllm
