"""The token embedding (cpu/layers/embedding.cpp, cuda/layers/embedding.cu); kernels/ops/linear.py defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import linear as reference
from .arguments import FLOATS

_embedding = torch.ops.localllm.embedding.default


def embedding(tokens: Tensor, weight: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or weight.dtype
    supported = {dtype, weight.dtype} <= FLOATS and tokens.dtype == torch.int32
    if not supported:
        return reference.embedding(tokens, weight, scale, dtype)
    out = weight.new_empty((tokens.shape[0], weight.shape[1]), dtype=dtype)
    _embedding(out, tokens, weight, reference.rounded(scale, dtype))
    return out
