// Gated activations. Rows are divided into chunks, so that all workers compute even if there is only one row.
#include "gate.h"
#include "../vectors/row.h"

namespace localllm::VARIANT {
namespace {

constexpr int64_t CHUNK = 256;  // elements per chunk

template <class T, class F>
void gate_chunks(const ActivationArgs& args, const Worker& worker, F activate) {
  int64_t chunks = (args.dim + CHUNK - 1) / CHUNK;
  Share share = share_of(args.rows * chunks, worker);
  for (long item = share.begin; item < share.end; item++) {
    int64_t row = item / chunks, begin = item % chunks * CHUNK;
    int64_t end = begin + CHUNK < args.dim ? begin + CHUNK : args.dim;
    const T* gates = (const T*)args.x + row * args.x_stride;
    const T* ups = gates + args.dim;
    T* out = (T*)args.out + row * args.out_stride;
    each_vector(begin, end, [&](int64_t i, auto n) {
      store(out + i, activate(load(gates + i, n)) * load(ups + i, n), n);
    });
  }
}

template <class T>
void gate_as(const ActivationArgs& args, const Worker& worker) {
  switch (args.kind) {
    case Activation::silu: return gate_chunks<T>(args, worker, [](F32 x) { return silu(x); });
    case Activation::gelu: return gate_chunks<T>(args, worker, [](F32 x) { return gelu(x); });
    case Activation::gelu_tanh: return gate_chunks<T>(args, worker, [](F32 x) { return gelu_tanh(x); });
  }
}

}  // namespace

void gate(const ActivationArgs& args, const Worker& worker) {
  switch (args.type) {
    case Type::f32: return gate_as<float>(args, worker);
    case Type::bf16: return gate_as<bf16>(args, worker);
    case Type::f16: return gate_as<f16>(args, worker);
  }
}

}  // namespace localllm::VARIANT
