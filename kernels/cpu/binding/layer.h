// The op layer, which the op layers calls as well.
#pragma once

#include <optional>
#include <vector>

#include "arguments.h"

namespace localllm {

// schema.cpp names the arguments. Overwrites x and stream.
void layer_op(Tensor x, Tensor stream, std::vector<Tensor> norms, std::vector<Tensor> head_norm_weights,
              std::vector<Tensor> weights, std::vector<Tensor> biases, std::vector<int64_t> formats,
              std::vector<int64_t> groups, bool wide, Tensor cos, Tensor sin, Tensor slots, Tensor key_pages,
              Tensor value_pages, Tensor row_starts, Tensor context_lens, Tensor page_table,
              std::optional<Tensor> sinks, int64_t heads, int64_t inner, int64_t gate, int64_t rotation, int64_t window,
              double eps, double offset, double scale, double soft_cap, std::vector<Tensor> lora_a,
              std::vector<Tensor> lora_b, std::vector<int64_t> lora_widths, std::optional<Tensor> lora_scales,
              std::optional<Tensor> lora_order, std::optional<Tensor> lora_starts, std::optional<Tensor> lora_slots);

}  // namespace localllm
