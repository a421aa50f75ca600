"""Mixtures of experts on the NPU. kernels/ops/moe.py has the references.

The tokens of all choices are sorted by expert, multiplied by grouped products, and summed for each token. No step reads
a tensor on the host, so graphs can capture it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...kernels.ops import moe as reference
from ...kernels.ops.linear import Int4, Int8, Weight
from ...kernels.ops.linear_int4 import spread
from ...kernels.ops.moe import ExpertGate, ExpertWeights, Moe, Routed, Routing
from .elementwise import ACTIVATION
from .products import DTYPE, WORD, Columns, Int4Columns, Int8Columns, stack

MAX_EXPERTS = 1024  # of a grouped product
MAX_ROUTED = 2048  # experts of npu_moe_gating_top_k; those of a group count as a multiple of 32
MIN_GROUP = 3  # experts of a group of npu_moe_gating_top_k
SCORES = ("softmax", "sigmoid")  # index: norm_type
GROUP_SCORES = ("max", "top2")  # index: group_select_mode


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routed:
    """See moe.route. Of equal scores, the kernel chooses any."""
    if routing.score == "softmax" and routing.groups == 1 and correction is None and len(logits):
        weights, choices, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits, k=routing.top_k)
    elif len(logits) and _supports_groups(logits.shape[1], routing):
        scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
        _, choices, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits,
            routing.top_k,
            bias=correction,
            k_group=routing.top_groups,
            group_count=routing.groups,
            group_select_mode=GROUP_SCORES.index(routing.group_score),
            norm_type=SCORES.index(routing.score),
        )
        weights = scores.gather(1, choices.long())
    else:
        return reference.route(logits, routing, correction)
    if routing.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    return Routed(choices, weights * routing.scale)


def _supports_groups(experts: int, routing: Routing) -> bool:
    """Whether npu_moe_gating_top_k supports this choice."""
    group = experts // routing.groups
    return group >= MIN_GROUP and -(-group // 32) * 32 * routing.groups <= MAX_ROUTED


class Dispatched(NamedTuple):
    """The tokens of all choices, sorted by expert."""

    rows: Tensor  # [tokens * top_k, hidden]
    scales: Tensor  # [tokens * top_k] float32 of int8 rows; else undefined
    positions: Tensor  # [tokens * top_k] int32: the row of each choice, token after token
    counts: Tensor  # [experts] int64: rows of each expert


def experts(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """See moe.experts. Products and the results of experts are rounded to x's dtype, and so are the routing weights."""
    if not isinstance(weights.gate_up, Columns):
        return reference.experts(x, routed, weights)
    if not len(x):
        return torch.empty_like(x)
    quantises = isinstance(weights.gate_up, Int8Columns)
    dispatch = _dispatch(x, routed, weights.experts, quantises)
    gate_up = _grouped(dispatch.rows, dispatch.scales, weights.gate_up, dispatch.counts)
    if weights.gate_up_bias is not None:
        gate_up = gate_up + weights.gate_up_bias.to(x.dtype).index_select(0, routed.experts.flatten().sort().values)
    inner, scales = _activate(gate_up, weights.gate, quantises)
    results = _grouped(inner, scales, weights.down, dispatch.counts)
    return _combine(results, routed, dispatch.positions, weights.down_bias)


def _dispatch(x: Tensor, routed: Routed, experts: int, quantises: bool) -> Dispatched:
    """The rows of x [tokens, hidden] for each choice. `quantises`: to int8, with a scale for each row."""
    rows, positions, counts, scales = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        routed.experts,
        active_num=routed.experts.numel(),
        expert_capacity=0,
        expert_num=experts,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=1 if quantises else -1,
        active_expert_range=[0, experts],
        row_idx_type=0,
    )
    return Dispatched(rows, scales, positions, counts)


def _grouped(x: Tensor, scales: Tensor | None, weight: Columns, counts: Tensor) -> Tensor:
    """x [rows, in_features], sorted by expert -> [rows, out_features] bfloat16. `scales`: of rows of int8."""
    options: dict[str, Any] = {}
    if isinstance(weight, Int8Columns):
        # The kernel requires bfloat16 scales for a bfloat16 result.
        options = {"scale": [weight.scale.to(DTYPE)], "per_token_scale": [scales], "output_dtype": DTYPE}
    elif isinstance(weight, Int4Columns):
        parts = [part if weight.group else part.squeeze(1) for part in (weight.scale, weight.offset)]
        options = {"antiquant_scale": parts[:1], "antiquant_offset": parts[1:]}
    (output,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight.data],
        group_list=counts,
        split_item=2,  # one output tensor
        group_type=0,  # the groups are rows of x
        group_list_type=1 if len(counts) > 1 else 0,  # counts; sums for one expert, which are the same
        **options,
    )
    result: Tensor = output
    return result


def _activate(gate_up: Tensor, gate: ExpertGate, quantises: bool) -> tuple[Tensor, Tensor | None]:
    """The gated activations [rows, inner], with the scales of rows if `quantises`."""
    if quantises and gate == "silu_and_mul":
        inner, scales = torch.ops.npu.npu_dequant_swiglu_quant(gate_up, activate_left=True, quant_mode=1)
        return inner, scales
    activated = getattr(ACTIVATION, gate)(gate_up)
    return torch.ops.npu.npu_dynamic_quant(activated) if quantises else (activated, None)


def _combine(results: Tensor, routed: Routed, positions: Tensor, bias: Tensor | None) -> Tensor:
    """The weighted sums [tokens, hidden] of results [tokens * top_k, hidden] sorted by expert."""
    tokens, top_k = routed.experts.shape
    output: Tensor = torch.ops.npu.npu_moe_finalize_routing(
        results,
        skip1=None,
        skip2=None,
        bias=None if bias is None else bias.to(results.dtype),
        scales=routed.weights.to(results.dtype),
        expanded_src_to_dst_row=positions.view(tokens, top_k).t().flatten(),  # choice after choice
        export_for_source_row=routed.experts,
        drop_pad_mode=0,
        k=top_k,
    )
    return output


def pack_slices(slices: Iterable[Weight], experts: int, out_features: int, dtype: torch.dtype) -> Any:
    """See moe.pack_slices. int4 weights become floats if an expert's outputs are no multiple of WORD."""
    slices = iter(slices)
    first = next(slices)
    slices = chain([first], slices)
    if dtype != DTYPE or experts > MAX_EXPERTS or not isinstance(first, Tensor | Int8 | Int4):
        return reference.pack_slices(slices, experts, out_features, dtype)
    if isinstance(first, Int4):
        slices = map(_regrouped if out_features % WORD == 0 else Int4.dense, cast(Iterator[Int4], slices))
    return stack(slices, experts, out_features)


def _regrouped(weight: Int4) -> Int4:
    """The weight with smaller groups, if its last group is shorter: the grouped product needs groups of one size."""
    if weight.group >= weight.in_features or weight.in_features % weight.group == 0:
        return weight
    group = math.gcd(weight.group, weight.in_features)
    groups = weight.in_features // group
    scale, zero = (spread(part, weight.group // group, groups) for part in (weight.scale, weight.zero))
    return weight._replace(scale=scale, zero=zero, group=group)


MOE = Moe(route=route, experts=experts, pack_slices=pack_slices)
