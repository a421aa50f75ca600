"""Writes to the paged cache on the CPU (kv.cpp, append.cpp); kernels/ops/kv.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled.arguments import FLOATS, ROTATIONS, heads_dense
from ...ops import kv as reference
from ...ops.kv import Rotation

_store = torch.ops.localllm.store.default
_copy_pages = torch.ops.localllm.copy_pages.default
_append = torch.ops.localllm.append.default


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    if {key.dtype, key_pages.dtype} <= FLOATS:
        _store(heads_dense(key), heads_dense(value), key_pages, value_pages, slots)
    else:
        reference.store(key, value, key_pages, value_pages, slots)


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    sources = sources.contiguous()
    targets = targets.contiguous()
    for layer_pages in pages:
        _copy_pages(layer_pages, sources, targets)


def append(
    qkv: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    offset: float,
    cos: Tensor,
    sin: Tensor,
    rotation: Rotation,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
) -> Tensor:
    """The returned queries are a view of qkv, rotated in place."""
    if not {qkv.dtype, key_pages.dtype} <= FLOATS:
        return reference.append(
            qkv, query_norm, key_norm, eps, offset, cos, sin, rotation, slots, key_pages, value_pages
        )
    _append(qkv, query_norm, key_norm, eps, offset, cos, sin, ROTATIONS[rotation], slots, key_pages, value_pages)
    return qkv.narrow(1, 0, qkv.shape[1] - 2 * key_pages.shape[2])
