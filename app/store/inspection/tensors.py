"""Counts the tensors of a model: bytes by dtype, and values before quantisation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ....engine.files.tensor_files import StoredTensor
from ..records import DtypeShare

# Ends of the names of tensors that belong to a quantised weight: scales, zero points, orders.
AUXILIARY = (
    ".qzeros",
    ".scales",
    ".zeros",
    ".g_idx",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_shape",
    ".input_scale",
    ".k_scale",
    ".v_scale",
)
PACKED = (".qweight", ".weight_packed", ".weight")  # ends of the names of weights with several values in 32 bits
WORD_BITS = 32


def dtype_shares(tensors: Iterable[tuple[str, int]]) -> tuple[DtypeShare, ...]:
    """The shares of (dtype, bytes) pairs, the largest first."""
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for dtype, num_bytes in tensors:
        counts[dtype] = counts.get(dtype, 0) + 1
        sizes[dtype] = sizes.get(dtype, 0) + num_bytes
    order = sorted(sizes, key=lambda dtype: (-sizes[dtype], dtype))
    return tuple(DtypeShare(dtype, counts[dtype], sizes[dtype]) for dtype in order)


def num_parameters(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> int:
    """The number of values of all weights before quantisation. `config`: the values of config.json."""
    total = 0
    for name, tensor in tensors.items():
        if name.endswith(AUXILIARY) or _is_mlx_bias(name, tensors):
            continue
        values = math.prod(tensor.shape)
        if _is_packed(name, tensor, tensors):
            values = values * WORD_BITS // _bits(name, config)
        total += values
    return total


def _is_mlx_bias(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor has the zero points of a weight that MLX quantised."""
    return name.endswith(".biases") and name.removesuffix(".biases") + ".scales" in tensors


def _is_packed(name: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> bool:
    if tensor.dtype not in ("I32", "U32") or not name.endswith(PACKED):
        return False
    return not name.endswith(".weight") or name.removesuffix(".weight") + ".scales" in tensors


def _bits(name: str, config: Mapping[str, Any]) -> int:
    """Bits of one quantised value of a weight; 4 if config.json has no valid number."""
    module = name.rpartition(".")[0]
    tables = [config.get("quantization"), config.get("quantization_config"), config.get("compression_config")]
    for table in filter(lambda table: isinstance(table, dict), tables):
        assert isinstance(table, dict)
        for place in (table.get(module), table, _first_group(table)):
            bits = place.get("bits", place.get("num_bits")) if isinstance(place, dict) else None
            if type(bits) is int and 1 <= bits <= WORD_BITS:
                return bits
    return 4


def _first_group(table: Mapping[str, Any]) -> object:
    """The weights of the first group in a table of compressed-tensors."""
    groups = table.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return None
    group = next(iter(groups.values()))
    return group.get("weights") if isinstance(group, dict) else None
