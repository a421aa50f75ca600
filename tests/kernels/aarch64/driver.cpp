// Runs some kernels of the generic variant on fixed numbers and prints their results. scripts/aarch64 compares the text
// of two processors.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "isa/dispatch.h"
#include "team/team.h"

using namespace localllm;

namespace {

using Floats = std::vector<float>;

constexpr int ROWS = 5, IN_FEATURES = 70, OUT_FEATURES = 49;

float random_number() {  // from -1 to 1
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (int32_t)(state >> 8) / 8388608.0f - 1.0f;
}

Floats floats(int count) {
  Floats values(count);
  for (float& value : values) value = random_number();
  return values;
}

void show(const char* name, const Floats& values) {
  double sum = 0, magnitude = 0;
  for (float value : values) sum += value, magnitude += std::fabs(value);
  std::printf("%-12s %.2f %.2f %.3f %.3f\n", name, sum, magnitude, values.front(), values.back());
}

template <class Args>
void run(void (*kernel)(const Args&, const Worker&), const Args& args) {
  Run(INT64_MAX).all(kernel, args);
}

void norm(const Floats& x) {
  Floats weight = floats(IN_FEATURES), out(ROWS * IN_FEATURES);
  NormArgs args{};
  args.out = out.data(), args.x = x.data(), args.weight = weight.data(), args.eps = 1e-6f;
  args.rows = ROWS, args.heads = 1, args.dim = args.x_stride = args.out_stride = IN_FEATURES;
  run(variant().rms_norm, args);
  show("rms_norm", out);
}

void gate(const Floats& x, Activation kind) {
  Floats out(ROWS * IN_FEATURES / 2);
  ActivationArgs args{out.data(), x.data(), Type::f32, kind, ROWS, IN_FEATURES / 2, IN_FEATURES, IN_FEATURES / 2};
  run(variant().gate, args);
  show("gate", out);
}

void linear(const Floats& x, const char* name, Format format, const void* weight, const float* scales) {
  Floats memory(packed_bytes(format, OUT_FEATURES, IN_FEATURES, 0) / 4 + 16);
  void* packed = (void*)(((uintptr_t)memory.data() + 63) / 64 * 64);
  run(variant().pack, PackArgs{packed, weight, scales, nullptr, format, OUT_FEATURES, IN_FEATURES, 0});
  Floats out(ROWS * OUT_FEATURES);
  LinearArgs args{};
  args.out = out.data(), args.x = x.data(), args.weight = packed, args.format = format;
  args.rows = ROWS, args.out_features = args.out_stride = OUT_FEATURES, args.in_features = args.x_stride = IN_FEATURES;
  Run team(INT64_MAX);
  args.shared = team.shared(variant().linear_shared(args, team.workers()) + 64);
  team.all(variant().linear, args);
  show(name, out);
}

}  // namespace

int main() {
  use_variant("generic");
  use_threads(2);
  Floats x = floats(ROWS * IN_FEATURES), weight = floats(OUT_FEATURES * IN_FEATURES), scales(OUT_FEATURES, 0.01f);
  std::vector<int8_t> integers;
  for (float value : weight) integers.push_back((int8_t)(value * 127));
  norm(x);
  for (Activation kind : {Activation::silu, Activation::gelu, Activation::gelu_tanh}) gate(x, kind);
  linear(x, "linear f32", Format::f32, weight.data(), nullptr);
  linear(x, "linear int8", Format::int8, integers.data(), scales.data());
}
