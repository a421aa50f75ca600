"""The first half of a gated MLP of experts with weights of 4 bits: both products and the gate in one launch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

GROUP, BITS = 64, 4
ROWS = 8  # outputs of a threadgroup


class Experts(NamedTuple):
    """A projection of every expert, as mx.quantize makes it: affine, 4 bits, 64 inputs a scale."""

    weight: mx.array  # [experts, outs, ins / 8] uint32
    scales: mx.array  # [experts, outs, ins / 64]
    biases: mx.array  # the same


def reference(x: mx.array, gate: Experts, up: Experts, chosen: mx.array) -> mx.array:
    """silu(gate(x)) * up(x): x [tokens, ins], chosen [tokens, k] experts -> [tokens, k, outs] in x's dtype."""

    def product(experts: Experts) -> mx.array:
        return mx.gather_qmm(
            x[:, None, None], *experts, rhs_indices=chosen, transpose=True, group_size=GROUP, bits=BITS
        ).squeeze(-2)

    return nn.silu(product(gate)) * product(up)


# One SIMD group for each output; its threads take every so-manieth word of 8 weights. The scale and the bias of a group
# are applied to sums: scale * sum(x q) + bias * sum(x).
SOURCE = """
    uint lane = thread_index_in_simdgroup;
    uint out_index = thread_position_in_grid.y, pair = thread_position_in_grid.z;
    uint words = INS / 8, groups = INS / 64;
    uint row = uint(chosen[pair]) * OUTS + out_index;
    float gate_sum = 0.0f, up_sum = 0.0f;
    for (uint word = lane; word < words; word += threads_per_simdgroup) {
      uint gate_bits = gate_weight[row * words + word], up_bits = up_weight[row * words + word];
      uint group = row * groups + word / 8;
      float gate_dot = 0.0f, up_dot = 0.0f, total = 0.0f;
      for (uint i = 0; i < 8; i++) {
        float value = float(x[(pair / CHOICES) * INS + word * 8 + i]);
        gate_dot += value * float((gate_bits >> (4 * i)) & 15);
        up_dot += value * float((up_bits >> (4 * i)) & 15);
        total += value;
      }
      gate_sum += float(gate_scales[group]) * gate_dot + float(gate_biases[group]) * total;
      up_sum += float(up_scales[group]) * up_dot + float(up_biases[group]) * total;
    }
    gate_sum = simd_sum(gate_sum);
    up_sum = simd_sum(up_sum);
    if (lane == 0) out[pair * OUTS + out_index] = T(gate_sum / (1.0f + exp(-gate_sum)) * up_sum);
"""
INPUTS = ("x", "chosen", "gate_weight", "gate_scales", "gate_biases", "up_weight", "up_scales", "up_biases")


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel("localllm_swiglu", list(INPUTS), ["out"], SOURCE)


def fits(x: mx.array, gate: Experts, up: Experts) -> bool:
    """Whether the kernel computes these; sums are float32, so any float will do."""
    return x.shape[-1] % GROUP == 0 and gate.weight.shape == up.weight.shape and gate.weight.shape[1] % ROWS == 0


def swiglu(x: mx.array, gate: Experts, up: Experts, chosen: mx.array) -> mx.array:
    """See `reference`, which computes what does not fit."""
    if not (mx.metal.is_available() and fits(x, gate, up)):
        return reference(x, gate, up, chosen)
    (tokens, ins), choices, outs = x.shape, chosen.shape[-1], gate.weight.shape[1]
    found: mx.array = _kernel()(
        inputs=[x, chosen.astype(mx.uint32), *gate, *up],
        template=[("T", x.dtype), ("INS", ins), ("OUTS", outs), ("CHOICES", choices)],
        grid=(32, outs, tokens * choices),
        threadgroup=(32, ROWS, 1),
        output_shapes=[(tokens, choices, outs)],
        output_dtypes=[x.dtype],
    )[0]
    return found
