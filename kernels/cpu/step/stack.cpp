// All layers of a model as one op: calls the ops of single layers, and of their experts.
#include <torch/csrc/stable/library.h>

#include "../binding/checks.h"
#include "../binding/layer.h"
#include "../binding/routed_experts.h"

namespace localllm {
namespace {

// Reads the constant arguments of all layers, in the order in which stack.py writes them.
class Reader {
 public:
  Reader(const std::vector<Tensor>& tensors, const Tensor& numbers, const Tensor& reals) : tensors_(tensors) {
    Argument integers("layers", "numbers", numbers), floats("layers", "reals", reals);
    integers_ = integers.shaped({ANY}).of(ScalarType::Long).dense().data<int64_t>();
    floats_ = floats.shaped({ANY}).of(ScalarType::Double).dense().data<double>();
    integer_count_ = integers.size(0), float_count_ = floats.size(0);
  }
  bool has_layer() const { return integer_ < integer_count_; }
  void refuse_rest() const {
    if (tensor_ < tensors_.size() || float_ < float_count_) refuse("layers: tensors or reals is too long");
  }
  int64_t number() {
    if (integer_ == integer_count_) refuse("layers: numbers is too short");
    return integers_[integer_++];
  }
  double real() {
    if (float_ == float_count_) refuse("layers: reals is too short");
    return floats_[float_++];
  }
  Tensor tensor() {
    if (tensor_ == tensors_.size()) refuse("layers: tensors is too short");
    return tensors_[tensor_++];
  }
  std::optional<Tensor> optional() { return number() ? std::optional<Tensor>(tensor()) : std::nullopt; }
  std::vector<int64_t> numbers(int64_t count) {
    std::vector<int64_t> result;
    for (int64_t i = 0; i < count; i++) result.push_back(number());
    return result;
  }
  std::vector<Tensor> tensors(int64_t count) {
    std::vector<Tensor> result;
    for (int64_t i = 0; i < count; i++) result.push_back(tensor());
    return result;
  }

 private:
  const std::vector<Tensor>& tensors_;
  const int64_t* integers_;
  const double* floats_;
  int64_t integer_ = 0, integer_count_, float_ = 0, float_count_;
  size_t tensor_ = 0;
};

// The tensors of a step. Each layer selects its rotation and its pages from them.
struct StepTensors {
  const std::vector<Tensor>&cos, &sin;
  const std::vector<Tensor>&slots, &key_pages, &value_pages;
  const Tensor &row_starts, &context_lens;
  const std::vector<Tensor>& page_tables;
};

// Computes the next layer, whose number is `layer`, without its experts.
void compute_layer(const Tensor& x, const Tensor& stream, Reader& next, const StepTensors& step, int64_t layer) {
  int64_t norm_count = next.number(), head_norm_count = next.number(), count = next.number();
  auto norms = next.tensors(norm_count), head_norms = next.tensors(head_norm_count);
  auto weights = next.tensors(count), biases = next.tensors(count);
  auto formats = next.numbers(count), groups = next.numbers(count);
  bool wide = next.number();
  int64_t rotation_index = next.number(), cache_index = next.number();
  int64_t heads = next.number(), inner = next.number(), gate = next.number(), rotation = next.number();
  int64_t window = next.number();
  double eps = next.real(), offset = next.real(), scale = next.real(), soft_cap = next.real();
  auto sinks = next.optional();
  auto of = [](const std::vector<Tensor>& tensors, int64_t index, const char* name) {
    if (index < 0 || index >= int64_t(tensors.size()))
      refuse("layers: index ", index, " of ", name, ", which has ", tensors.size(), " tensors");
    return tensors[index];
  };
  int64_t place = step.slots.size() == 1 ? 0 : layer;  // the layers of one cache group have the same slots
  layer_op(x, stream, norms, head_norms, weights, biases, formats, groups, wide, of(step.cos, rotation_index, "cos"),
           of(step.sin, rotation_index, "sin"), of(step.slots, place, "slots"), of(step.key_pages, cache_index, "key_pages"),
           of(step.value_pages, cache_index, "value_pages"), step.row_starts, step.context_lens, of(step.page_tables, place, "page_tables"), sinks,
           heads, inner, gate, rotation, window, eps, offset, scale, soft_cap, {}, {}, {}, {}, {}, {}, {});
}

// Computes the experts of the layer before, if it has experts. They write their result over their input.
void compute_experts(const Tensor& x, Reader& next) {
  if (!next.number()) return;
  auto router = next.tensor(), gate_up = next.tensor(), down = next.tensor();
  double scale = next.real();
  int64_t router_format = next.number(), router_group = next.number(), score = next.number();
  bool renormalise = next.number();
  int64_t groups = next.number(), top_groups = next.number();
  bool top2 = next.number();
  int64_t top_k = next.number(), format = next.number(), gate_up_group = next.number(), down_group = next.number();
  bool wide = next.number();
  int64_t experts = next.number(), inner = next.number(), gate = next.number();
  auto router_bias = next.optional(), correction = next.optional();
  auto gate_up_bias = next.optional(), down_bias = next.optional();
  routed_experts(x, x, router, router_bias, router_format, router_group, correction, score, renormalise, scale, groups,
                 top_groups, top2, top_k, gate_up, down, gate_up_bias, down_bias, format, gate_up_group, down_group,
                 wide, experts, inner, gate);
}

void layers_op(Tensor x, Tensor stream, std::vector<Tensor> tensors, Tensor numbers, Tensor reals,
               std::vector<Tensor> cos, std::vector<Tensor> sin, std::vector<Tensor> slots,
               std::vector<Tensor> key_pages, std::vector<Tensor> value_pages, Tensor row_starts, Tensor context_lens,
               std::vector<Tensor> page_tables) {
  Reader reader(tensors, numbers, reals);
  const StepTensors step{cos, sin, slots, key_pages, value_pages, row_starts, context_lens, page_tables};
  for (int64_t layer = 0; reader.has_layer(); layer++) {
    compute_layer(x, stream, reader, step, layer);
    compute_experts(x, reader);
  }
  reader.refuse_rest();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(localllm, CPU, library) { library.impl("layers", TORCH_BOX(&layers_op)); }

}  // namespace localllm
