"""LoRA products on the NPU: grouped products over the tokens of each adapter. kernels/ops/lora.py has the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.ops import lora as reference
from ...kernels.ops.lora import Lora, LoraWeights
from ...kernels.ops.step import Adapters
from .products import DTYPE

MAX_SLOTS = 128  # weights of a grouped product
REFERENCE_ADAPTERS = 2  # at most so many adapters are computed by the reference, with fewer launches


def add(out: Tensor, x: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    """See lora.add. The products with A are rounded to x's dtype. The reference computes steps that are not captured:
    it knows on the host which tokens have which adapter."""
    slots = len(weights.a)
    is_grouped = adapters.segments is None and len(adapters.used) > REFERENCE_ADAPTERS and slots <= MAX_SLOTS
    if not is_grouped or x.dtype != DTYPE or weights.a.dtype != DTYPE:
        reference.add(out, x, weights, adapters)
        return
    order = adapters.slots.argsort()
    counts = (adapters.slots == torch.arange(slots, device=x.device).unsqueeze(1)).sum(1)  # tokens of each slot
    inner = _grouped(x.index_select(0, order), list(weights.a), counts)
    inner = inner * adapters.scales.index_select(0, order).unsqueeze(1).to(x.dtype)
    factors = zip(*(b.split(weights.widths) for b in weights.b), strict=True)  # of each slice, those of all slots
    parts = [
        _grouped(part.contiguous(), list(b), counts)
        for part, b in zip(inner.split(weights.rank, dim=1), factors, strict=True)
    ]
    out.index_add_(0, order, torch.cat(parts, dim=1).to(out.dtype))


def _grouped(x: Tensor, weights: list[Tensor], counts: Tensor) -> Tensor:
    """x [tokens, in_features], sorted by slot, times the weight [out_features, in_features] of each slot."""
    (output,) = torch.ops.npu.npu_grouped_matmul(
        [x], [weight.t() for weight in weights], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )
    result: Tensor = output
    return result


LORA = Lora(add=add)
