// The op routed_experts, which the op layers calls as well.
#pragma once

#include <optional>

#include "arguments.h"

namespace localllm {

// Computes the product of the router, the choices of the tokens and their experts. `out` may be the memory of x: all
// products of a chunk of tokens have read x before `out` is written.
void routed_experts(Tensor out, Tensor x, Tensor router, std::optional<Tensor> router_bias, int64_t router_format,
                    int64_t router_group, std::optional<Tensor> correction, int64_t score, bool renormalise,
                    double scale, int64_t groups, int64_t top_groups, bool top2, int64_t top_k, Tensor gate_up,
                    Tensor down, std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias, int64_t format,
                    int64_t gate_up_group, int64_t down_group, bool wide, int64_t experts, int64_t inner,
                    int64_t gate);

}  // namespace localllm
