// Embedding lookup from a table in its original layout.
#include "../vectors/row.h"

namespace localllm::VARIANT {
namespace {

template <class T, class W>
void look_up(const EmbeddingArgs& args, const Worker& worker) {
  Share share = share_of(args.count, worker);
  F32 scale = set1(args.scale);
  for (long index = share.begin; index < share.end; index++) {
    const W* from = (const W*)args.weight + args.tokens[index] * args.dim;
    T* to = (T*)args.out + index * args.dim;
    each_vector(0, args.dim, [&](int64_t i, auto n) { store(to + i, load(from + i, n) * scale, n); });
  }
}

template <class T>
void look_up_as(const EmbeddingArgs& args, const Worker& worker) {
  switch (args.weight_type) {
    case Type::f32: return look_up<T, float>(args, worker);
    case Type::bf16: return look_up<T, bf16>(args, worker);
    case Type::f16: return look_up<T, f16>(args, worker);
  }
}

}  // namespace

void embedding(const EmbeddingArgs& args, const Worker& worker) {
  switch (args.type) {
    case Type::f32: return look_up_as<float>(args, worker);
    case Type::bf16: return look_up_as<bf16>(args, worker);
    case Type::f16: return look_up_as<f16>(args, worker);
  }
}

}  // namespace localllm::VARIANT
