"""LoRA products on CUDA devices. kernels/ops/lora.py defines them.

CUDA C++ (products.cu) computes steps of up to MAX_TOKENS tokens. Triton computes longer steps and the embedding.

`project` computes the inner products scale * A x before the product of the base model. Their kernel reads the first
factors while the kernel ahead still runs. The product of the base model then adds the LoRA product itself: in its
epilogue for a small batch, or because torch's product adds to the outputs that lora_expand wrote.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compiled.arguments import FLOATS
from ...ops import Ops
from ...ops import lora as reference
from ...ops.lora import Lora, LoraWeights
from ...ops.projection import Product, Projection
from ...ops.step import Adapters
from ..products.linear import BF16, TRITON, Packed, is_small_batch_of_bf16

_shrink = torch.ops.localllm.lora_shrink.default
_expand = torch.ops.localllm.lora_expand.default
_small_batch = torch.ops.localllm.small_batch_lora.default
for _name in ("lora_shrink", "lora_expand", "small_batch_lora"):
    torch.library.register_fake(f"localllm::{_name}", lambda *_: None, allow_override=True)

MAX_TOKENS = 256  # a larger step computes prompts
MAX_SLICES = 3  # same as MAX_LORA_SLICES in kernels.h
MAX_SHARES = 8
SHARE = 512  # smallest number of inputs of a share that is worth its thread block
MAX_SMALL_BATCH_INNER = 1024  # same as MAX_LORA_INNER in products.h


class Arguments(NamedTuple):
    """The arguments that lora_shrink and lora_expand share."""

    a: Tensor
    b: Tensor
    widths: tuple[int, ...]
    slots: Tensor
    scales: Tensor
    order: Tensor
    starts: Tensor
    tile_slots: Tensor
    chunk: int


def add(out: Tensor, x: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    arguments = _arguments(x, weights, adapters)
    if arguments is None or out.stride(1) != 1 or out.dtype not in FLOATS:
        _long_steps().add(out, x, weights, adapters)
        return
    _expand(out, _inner(x, arguments), *arguments, True)


def project(
    base: Projection, x: Tensor, ops: Ops, weights: LoraWeights, adapters: Adapters, dtype: torch.dtype | None = None
) -> Tensor:
    """See kernels/ops/lora.py. No kernel that is still running may write the factors or the tiles."""
    dtype = dtype or x.dtype
    arguments = _arguments(x, weights, adapters)
    if arguments is None:
        return reference.project(base, x, ops, weights, adapters, dtype)
    inner = _inner(x, arguments)
    weight = _plain_weight(base)
    bias = base.bias if isinstance(base, Product) else None
    small_batch = is_small_batch_of_bf16(x, weight, dtype)
    if weight is not None and small_batch and _fits_epilogue(weights, inner):
        result = x.new_empty(len(x), weight.out_features, dtype=dtype)
        _small_batch(result, x, weight.data, bias, inner, weights.b, adapters.slots, weights.widths)
        return result
    if weight is not None and not small_batch and dtype == x.dtype and bias is None:
        result = x.new_empty(len(x), weight.out_features)
        _expand(result, inner, *arguments, False)
        return result.addmm_(x, weight.data.t())
    result = base(x, ops, None, dtype)
    _expand(result, inner, *arguments, True)
    return result


def embedding(out: Tensor, tokens: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    _long_steps().embedding(out, tokens, weights, adapters)


def _arguments(x: Tensor, weights: LoraWeights, adapters: Adapters) -> Arguments | None:
    """The arguments of the kernels; None if other kernels compute this step."""
    tiles = adapters.tiles
    if tiles is None or not x.is_cuda or not 0 < len(x) <= MAX_TOKENS or x.stride(1) != 1:
        return None
    if x.dtype != weights.a.dtype or x.dtype not in FLOATS or len(weights.widths) > MAX_SLICES:
        return None
    return Arguments(weights.a, weights.b, weights.widths, adapters.slots, adapters.scales, *tiles)


def _inner(x: Tensor, arguments: Arguments) -> Tensor:
    """The inner products [shares, tokens, slices * rank]: scale * A x of each share of the inputs."""
    shares = max(1, min(MAX_SHARES, x.shape[1] // SHARE))
    inner = torch.empty(shares, len(x), arguments.a.shape[1], dtype=torch.float32, device=x.device)
    _shrink(inner, x, *arguments)
    return inner


def _plain_weight(base: Projection) -> Packed | None:
    """The packed bf16 weight of the projection; None if it has another form."""
    if not isinstance(base, Product) or base.op != "dense" or base.order is not None:
        return None
    weight = base.weight
    return weight if isinstance(weight, Packed) and weight.format == BF16 else None


def _fits_epilogue(weights: LoraWeights, inner: Tensor) -> bool:
    """True if a small-batch product can add the LoRA product in its epilogue."""
    b = weights.b
    aligned = weights.rank % 8 == 0 and b.stride(0) % 8 == 0 and b.data_ptr() % 16 == 0
    return aligned and inner.shape[1] * inner.shape[2] <= MAX_SMALL_BATCH_INNER


def _long_steps() -> Any:
    """The implementations for other steps: Triton's, or the references if Triton is not installed."""
    if not TRITON:
        return Lora()
    from ...triton import lora

    return lora
