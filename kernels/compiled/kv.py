"""Writes to the paged cache (kv and append in cpu/layers and cuda/layers); kernels/ops/kv.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.kv import Append
from .arguments import ROTATIONS, heads_dense

_store = torch.ops.localllm.store.default
_append = torch.ops.localllm.append.default


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    _store(heads_dense(key), heads_dense(value), key_pages, value_pages, slots)


def append(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, target: Append) -> Tensor:
    """The returned queries are a view of qkv, rotated in place."""
    norms = target.query_norm, target.key_norm, target.eps, target.offset
    rotation = ROTATIONS[target.rotation]
    _append(qkv, *norms, cos, sin, rotation, slots, target.key_pages, target.value_pages)
    return target.queries(qkv)
