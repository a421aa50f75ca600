// RMS norm. It makes several passes over a row; after the first pass the row is in the L1 cache.
#include "../vectors/row.h"

namespace localllm::VARIANT {
namespace {

// Sum of x². Four independent sums hide the latency of the multiply-adds.
template <class T>
float squares(const T* x, int64_t dim) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * WIDTH <= dim; i += 4 * WIDTH) {
    for (int chain = 0; chain < 4; chain++) {
      F32 value = load(x + i + chain * WIDTH);
      sums[chain] = fma(value, value, sums[chain]);
    }
  }
  for (; i + WIDTH <= dim; i += WIDTH) {
    F32 value = load(x + i);
    sums[0] = fma(value, value, sums[0]);
  }
  float rest = 0;
  for (; i < dim; i++) rest += to_float(x[i]) * to_float(x[i]);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

template <class T, class W>
void rms_rows(const NormArgs& args, Share share) {
  const W* weight = (const W*)args.weight;
  F32 offset = set1(args.offset);
  for (long item = share.begin; item < share.end; item++) {
    int64_t row = item / args.heads, head = item % args.heads;
    const T* x = (const T*)args.x + row * args.x_stride + head * args.dim;
    T* out = (T*)args.out + row * args.out_stride + head * args.dim;
    if (args.residual) {  // the norm uses the rounded sum, as stored in the residual
      T* residual = (T*)args.residual + item * args.dim;
      each_vector(0, args.dim, [&](int64_t i, auto n) {
        store(residual + i, load(x + i, n) + load(residual + i, n), n);
      });
      x = residual;
    }
    F32 scale = set1(1.0f / sqrtf(squares(x, args.dim) / (float)args.dim + args.eps));
    each_vector(0, args.dim, [&](int64_t i, auto n) {
      store(out + i, load(x + i, n) * scale * (load(weight + i, n) + offset), n);
    });
  }
}

template <class T>
void rms_as(const NormArgs& args, Share share) {
  switch (args.weight_type) {
    case Type::f32: return rms_rows<T, float>(args, share);
    case Type::bf16: return rms_rows<T, bf16>(args, share);
    case Type::f16: return rms_rows<T, f16>(args, share);
  }
}

}  // namespace

void rms_norm(const NormArgs& args, const Worker& worker) {
  Share share = share_of(args.rows * args.heads, worker);
  switch (args.type) {
    case Type::f32: return rms_as<float>(args, share);
    case Type::bf16: return rms_as<bf16>(args, share);
    case Type::f16: return rms_as<f16>(args, share);
  }
}

}  // namespace localllm::VARIANT
