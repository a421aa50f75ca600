"""Writing the paged cache on the CPU (kv.cpp); see kernels/ops/kv.py for what it means."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import kv as reference
from .floats import FLOATS

_store = torch.ops.localllm.store.default
_copy_pages = torch.ops.localllm.copy_pages.default


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    if key.dtype in FLOATS and key_pages.dtype in FLOATS:
        _store(_heads(key), _heads(value), key_pages, value_pages, slots)
    else:
        reference.store(key, value, key_pages, value_pages, slots)


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    _copy_pages(pages, sources, targets)


def _heads(x: Tensor) -> Tensor:
    """x [tokens, heads, dim], of which tokens may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
