"""Writes to the paged cache on the CPU (kv.cpp, append.cpp); kernels/ops/kv.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled import kv as compiled
from ...compiled.arguments import FLOATS
from ...ops import kv as reference
from ...ops.kv import Append

_copy_pages = torch.ops.localllm.copy_pages.default


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    if {key.dtype, key_pages.dtype} <= FLOATS:
        compiled.store(key, value, key_pages, value_pages, slots)
    else:
        reference.store(key, value, key_pages, value_pages, slots)


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    sources = sources.contiguous()
    targets = targets.contiguous()
    for layer_pages in pages:
        _copy_pages(layer_pages, sources, targets)


def append(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, target: Append) -> Tensor:
    if not {qkv.dtype, target.key_pages.dtype} <= FLOATS:
        return reference.append(qkv, cos, sin, slots, target)
    return compiled.append(qkv, cos, sin, slots, target)
