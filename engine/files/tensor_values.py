"""Reads the values of float tensors in files, and compares them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tensor_files import StoredTensor, refusing_unreadable

Floats = NDArray[np.float32]

# FLOATS as they are stored; numpy has no bfloat16.
STORED: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
BLOCK = 1 << 22  # values that are in memory at a time


def read_values(tensor: StoredTensor) -> Floats:
    """The values of a tensor with a dtype of FLOATS, in its shape. Raises ModelRefused if the file cannot be read."""
    values: Floats = np.concatenate([*_blocks(tensor), np.empty(0, np.float32)])
    return values.reshape(tensor.shape)


def is_copy(copy: StoredTensor, original: StoredTensor) -> bool:
    """Whether two tensors with dtypes of FLOATS have the same values, or one has those of the other after rounding."""
    if copy.shape != original.shape:
        return False
    for values, others in zip(_blocks(copy), _blocks(original), strict=True):
        is_equal = np.array_equal(values, _rounded(others, copy.dtype))
        if not is_equal and not np.array_equal(_rounded(values, original.dtype), others):
            return False
    return True


def _blocks(tensor: StoredTensor) -> Iterator[Floats]:
    dtype = STORED[tensor.dtype]
    left = math.prod(tensor.shape)
    with refusing_unreadable(tensor.file), tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        while left:
            stored = np.frombuffer(stream.read(min(BLOCK, left) * dtype.itemsize), dtype)
            left -= min(BLOCK, left)
            if tensor.dtype == "BF16":
                stored = (stored.astype(np.uint32) << 16).view(np.float32)
            yield stored.astype(np.float32)


def _rounded(values: Floats, dtype: str) -> Floats:
    """The values after a conversion to a dtype of FLOATS."""
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values
