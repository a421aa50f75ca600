// The steps between the QKV product and attention, in one pass: normalise the heads, rotate queries and keys, write
// keys and values to the pages. Computes in float and rounds once, when it stores.
#include "../vectors/convert.h"
#include "rotate.h"

namespace localllm::VARIANT {
namespace {

// In place: x [dim] = x / rms(x) * (offset + weight).
void normalise(const AppendArgs& args, const void* weight, float* x) {
  F32 squares = zero();
  each_vector(0, args.dim, [&](int64_t i, auto n) { squares = fma(load(x + i, n), load(x + i, n), squares); });
  float scale = 1.0f / sqrtf(sum(squares) / (float)args.dim + args.eps);
  as_stored(args.norm_type, weight, [&](auto* stored) {
    each_vector(0, args.dim, [&](int64_t i, auto n) {
      store(x + i, load(x + i, n) * set1(scale) * (load(stored + i, n) + set1(args.offset)), n);
    });
  });
}

}  // namespace

void append(const AppendArgs& args, const Worker& worker) {
  float* x = (float*)worker.scratch(args.dim * sizeof(float));
  int64_t heads = args.heads + 2 * args.kv_heads;
  Share share = share_of(args.tokens * heads, worker);
  for (int64_t i = share.begin; i < share.end; i++) {
    int64_t token = i / heads, head = i % heads, offset = token * args.stride + head * args.dim;
    bool query = head < args.heads, key = !query && head < args.heads + args.kv_heads;
    const void* weight = query ? args.query_norm : key ? args.key_norm : nullptr;
    widen(args.type, args.qkv, offset, x, args.dim);
    if (weight) normalise(args, weight, x);
    if (query || key) rotate(args.rotation, args.cos + token * args.half, args.sin + token * args.half, args.half, x);
    if (query) {
      narrow(args.type, x, 1.0f, args.qkv, offset, args.dim);
    } else {
      int64_t cache_offset = (args.slots[token] * args.kv_heads + (head - args.heads) % args.kv_heads) * args.dim;
      narrow(args.cache_type, x, 1.0f, key ? args.key_pages : args.value_pages, cache_offset, args.dim);
    }
  }
}

}  // namespace localllm::VARIANT
