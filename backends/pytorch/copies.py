"""Copies pages and recurrent states within their memory, before a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...engine.batch import Ints
from .device import Device


def copy_entries(tensors: Sequence[Tensor], copies: Ints, count: int, device: Device) -> None:
    """Copy entries of `tensors`, each [arrays, entries, …] as in kv.copy_pages, by `copies` [copies, 2], rows of
    (source, target). All sources are read before any write. Allocates memory for `count` entries; if the target of a
    copy is the source of another copy, for all copied entries of one array."""
    if not len(copies):
        return
    if np.isin(copies[:, 0], copies[:, 1]).any():
        tensors = [array for tensor in tensors for array in tensor.split(1)]
        count = len(copies)
    for start in range(0, len(copies), count):
        sources, targets = device.send(copies[start : start + count].T.astype(np.int64))
        for tensor in tensors:
            device.ops.kv.copy_pages(tensor, sources, targets)
