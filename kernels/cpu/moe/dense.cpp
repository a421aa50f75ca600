// Experts with f32, bf16 or f16 weights.

#include "../products/dense_panel.h"
#include "formats.h"
#include "experts.h"

namespace localllm::VARIANT {
namespace {

template <class P>
class DenseRows {
 public:
  static int64_t row_bytes(const LinearArgs&) { return 0; }
  static void prepare(const LinearArgs&, int64_t, uint8_t*) {}
  static void end() {}
  static int64_t memory_bytes(const LinearArgs& product, int64_t rows) {
    return rows * (PANEL * 4 + steps_of(product) * P::SUBSTEPS * sizeof(X));
  }

  explicit DenseRows(const LinearArgs& product) : steps(steps_of(product)), tiles(1) {}

  void arrange(const LinearArgs& segment, void* memory) {
    tiles = Tiles(segment.rows);
    sums = (float*)memory;
    x = (X*)(sums + segment.rows * PANEL);
    for (int64_t i = 0; i < tiles.count; i++)
      VARIANT::arrange<P>(segment, tiles.begin(i), tiles.rows(i), 0, steps * P::INPUTS,
                          x + tiles.begin(i) * steps * P::SUBSTEPS);
  }

  void multiply(const LinearArgs& panel, const void*) const {
    VARIANT::multiply<P>(x, (const typename P::Weight*)panel.weight, steps, tiles, 0, tiles.count, sums);
    for (int64_t row = 0; row < panel.rows; row++) write(panel, row, 0, sums + row * PANEL);
  }

 private:
  using X = typename P::X;
  int64_t steps;
  Tiles tiles;
  float* sums = nullptr;
  X* x = nullptr;

  static int64_t steps_of(const LinearArgs& product) { return (product.in_features + P::INPUTS - 1) / P::INPUTS; }
};

}  // namespace

size_t experts_dense_shared(const ExpertsArgs&) { return 0; }

void experts_dense(const ExpertsArgs& args, const Worker& worker) {
  switch (args.format) {
    case Format::f32: return run_experts<DenseRows<Singles>>(args, worker);
    case Format::f16: return run_experts<DenseRows<Pairs<f16>>>(args, worker);
    default: break;
  }
#if defined(__AVX512BF16__)
  if (uses_dots(args.type)) return run_experts<DenseRows<Dots>>(args, worker);
#endif
  run_experts<DenseRows<Pairs<bf16>>>(args, worker);
}

}  // namespace localllm::VARIANT
