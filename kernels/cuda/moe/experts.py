"""Mixture of experts on CUDA devices. kernels/ops/moe.py has the reference.

The weights are those that products/linear.py packs; MXFP4 weights are plain. CUDA C++ multiplies the choices of few
tokens with quantised weights (choices.cu), Triton all other choices. The reference computes what neither supports.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor

from ...ops import moe as reference
from ...ops.linear import Mxfp4, Weight
from ...ops.linear_mxfp4 import GROUP
from ...ops.mlp import Experts
from ...ops.moe import ExpertGate, ExpertWeights, Routed, Routing
from ...triton.problem import triton_problem
from ..products import linear
from ..products.linear import BF16, FP8, INT4, INT8, MXFP4, Packed, format_of, sub_of

TRITON = not triton_problem()
# For each op, the largest number of choices for which choice_products is faster than Triton; tuned on H200.
FEW = {"int8": 64, "int4": 128, "int4_wide": 128, "fp8": 64, "mxfp4": 128}
GATES = get_args(ExpertGate)  # values of the enum ExpertGate in kernels.h
MAX_IN_FEATURES = 16384  # limit of choice_products
_choice_products_op = torch.ops.localllm.choice_products.default
torch.library.register_fake("localllm::choice_products", lambda *_: None, allow_override=True)


def pack_slices(slices: Iterable[Weight], experts: int, out_features: int, dtype: torch.dtype) -> Any:
    """The weight as products/linear.py packs it. The scales of 8 outputs are contiguous, so if the outputs of an expert
    are no multiple of 8, the weight is not packed. MXFP4 weights stay plain."""
    slices = iter(slices)
    first = next(slices)
    slices = chain([first], slices)
    if out_features % 8 or isinstance(first, Mxfp4):
        return reference.pack_slices(slices, experts, out_features, dtype)
    return linear.pack_slices(slices, experts * out_features, dtype)


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routed:
    if TRITON and logits.is_cuda:
        from ...triton import moe

        return moe.route(logits, routing, correction)
    return reference.route(logits, routing, correction)


def norm_route(
    x: Tensor, stream: Tensor, norm: tuple[Tensor | None, float, float], experts: Experts
) -> tuple[Tensor, Tensor, Routed] | None:
    """The norm of x + stream, the sum, and the chosen experts of each token; `norm`: weight, eps and offset. None if
    one kernel does not support these arguments."""
    weight, eps, offset = norm
    router = experts.router.product
    if not (TRITON and x.is_cuda and weight is not None and router is not None):
        return None
    from ...triton import moe_norm_route as kernel

    data = router.weight.data if isinstance(router.weight, Packed) else router.weight
    plain = router.op == "dense" and router.order is None and x.dtype == torch.bfloat16
    if not plain or not kernel.supports_norm_route(x, weight, data, experts.correction):
        return None
    inputs = x.contiguous(), stream.contiguous()
    norm_weight = weight, eps, offset
    normed: tuple[Tensor, Tensor, Routed] = kernel.norm_route(
        *inputs, norm_weight, data, router.bias, experts.routing, experts.correction
    )
    return normed


def experts(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    if TRITON and x.is_cuda:
        from ...triton import moe

        if supports_few(x, routed, weights):
            return few(x, routed, weights)
        gate_up = _quantised(weights.gate_up, x.dtype)
        down = _quantised(weights.down, x.dtype)
        if moe.is_supported(x, weights, gate_up, down):
            return moe.compute(x, routed, weights, gate_up, down)
    return reference.experts(x, routed, weights._replace(gate_up=_plain(weights.gate_up), down=_plain(weights.down)))


def supports_few(x: Tensor, routed: Routed, weights: ExpertWeights) -> bool:
    """True if `few` supports the arguments."""
    if not 0 < routed.experts.numel() <= FEW.get(weights.op, 0):
        return False
    return x.dtype == torch.bfloat16 and all(map(is_few_format, (weights.gate_up, weights.down)))


def is_few_format(weight: Any) -> bool:
    """True if choice_products supports the weight."""
    if isinstance(weight, Mxfp4):
        return 2 * weight.data.shape[1] <= MAX_IN_FEATURES
    if not isinstance(weight, Packed) or weight.in_features % 8 or weight.in_features > MAX_IN_FEATURES:
        return False
    group = weight.group
    if weight.format == INT4:
        return group in (32, 64, 128)
    if weight.format == FP8 and weight.records is not None:
        return group >= 64 and group & (group - 1) == 0
    return weight.format in (INT8, FP8)


def few(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """The experts' output for few tokens x [tokens, hidden] bfloat16."""
    from ...triton.moe_product import combine
    from ...triton.target import device_properties

    x = linear.with_vectors(x)
    choices = routed.experts.numel()
    inner = x.new_empty(choices, weights.inner)
    results = x.new_empty(choices, x.shape[1], dtype=torch.float32)
    gate = GATES.index(weights.gate)
    choice_products(inner, x, routed, weights.op, weights.gate_up, weights.gate_up_bias, gate)
    choice_products(results, inner, routed, weights.op, weights.down, weights.down_bias, early=True)
    return combine(results, routed.weights, x.dtype, device_properties(x.device).target.overlaps)


def choice_products(
    out: Tensor, x: Tensor, routed: Routed, op: str, weight: Packed | Mxfp4, bias: Tensor | None, gate: int = -1,
    early: bool = False,
) -> None:  # fmt: skip
    """Writes the products of each choice into `out` [choices, outputs]. x: a row of each token, or of each choice.
    `gate`: an index in GATES; -1: none. `early`: the previous kernel was that of choice_products, and an earlier one
    wrote the experts."""
    bias = None if bias is None else bias.reshape(-1)
    if isinstance(weight, Mxfp4):
        arguments: tuple[Any, ...] = weight.data, weight.exponent, None, bias, MXFP4, GROUP
    else:
        arguments = weight.data, weight.records, weight.scale, bias, format_of(op, weight), weight.group
    _choice_products_op(out, x, routed.experts.reshape(-1), *arguments, gate, early)


def _plain(weight: Any) -> Any:
    return weight.plain() if isinstance(weight, Packed) else weight


def _quantised(weight: Any, dtype: torch.dtype) -> Any:
    """The weight as the Triton kernels read it; None if they do not support it."""
    from ...triton import moe
    from ...triton.widen import Quantised

    if not isinstance(weight, Packed):
        return moe.quantised(weight, dtype)
    data = weight.data
    out_features = weight.out_features
    in_features = weight.in_features
    if weight.format == BF16:
        return moe.quantised(data, dtype)
    if weight.format == INT8:
        assert weight.scale is not None
        return Quantised("int8", data.view(torch.int8), weight.scale, None, out_features, in_features, in_features)
    if weight.format == FP8 and weight.scale is not None:
        return Quantised("fp8", data, weight.scale, None, out_features, in_features, in_features)
    assert weight.records is not None
    sizes = out_features, in_features
    if weight.format == FP8:
        scale = weight.records.view(torch.float32)
        return Quantised("fp8", data, scale, None, *sizes, weight.group, records="transposed")
    sub = sub_of(weight.group, in_features)
    return Quantised("int4", data, weight.records, None, *sizes, sub, records="transposed")
