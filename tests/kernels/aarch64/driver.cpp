// A few kernels of the generic variant on fixed numbers, and what came out as text: scripts/aarch64 compares two processors.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "dispatch.h"
#include "team.h"

using namespace localllm;

namespace {

using Floats = std::vector<float>;

constexpr int ROWS = 5, INS = 70, OUTS = 49;

float drawn() {  // from -1 to 1
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (int32_t)(state >> 8) / 8388608.0f - 1.0f;
}

Floats floats(int count) {
  Floats values(count);
  for (float& value : values) value = drawn();
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
  Floats weight = floats(INS), out(ROWS * INS);
  NormArgs args{};
  args.out = out.data(), args.x = x.data(), args.weight = weight.data(), args.eps = 1e-6f;
  args.rows = ROWS, args.heads = 1, args.dim = args.x_stride = args.out_stride = INS;
  run(variant().rms_norm, args);
  show("rms_norm", out);
}

void gate(const Floats& x, Activation kind) {
  Floats out(ROWS * INS / 2);
  ActivationArgs args{out.data(), x.data(), Type::f32, kind, ROWS, INS / 2, INS, INS / 2};
  run(variant().gate, args);
  show("gate", out);
}

void linear(const Floats& x, const char* name, Format format, const void* weight, const float* scales) {
  Floats memory(packed_bytes(format, OUTS, INS, 0) / 4 + 16);
  void* packed = (void*)(((uintptr_t)memory.data() + 63) / 64 * 64);
  run(variant().pack, PackArgs{packed, weight, scales, nullptr, format, OUTS, INS, 0});
  Floats out(ROWS * OUTS);
  LinearArgs args{};
  args.out = out.data(), args.x = x.data(), args.weight = packed, args.format = format;
  args.rows = ROWS, args.outs = args.out_stride = OUTS, args.ins = args.x_stride = INS;
  Run team(INT64_MAX);
  args.shared = team.shared(variant().linear_shared(args, team.workers()) + 64);
  team.all(variant().linear, args);
  show(name, out);
}

}  // namespace

int main() {
  use_variant("generic");
  use_threads(2);
  Floats x = floats(ROWS * INS), weight = floats(OUTS * INS), scales(OUTS, 0.01f);
  std::vector<int8_t> whole;
  for (float value : weight) whole.push_back((int8_t)(value * 127));
  norm(x);
  for (Activation kind : {Activation::silu, Activation::gelu, Activation::gelu_tanh}) gate(x, kind);
  linear(x, "linear f32", Format::f32, weight.data(), nullptr);
  linear(x, "linear int8", Format::int8, whole.data(), scales.data());
}
