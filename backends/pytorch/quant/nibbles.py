"""Converts weights with eight 4-bit numbers in an int32, the layout of several formats, to the layout of Int4."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ....engine.errors import ModelRefused
from ....engine.files.quantization import Quantization
from ....kernels.ops.linear import Int4
from . import Tensors

IN_ORDER = range(8)


def unpacked(packed: Tensor, order: Sequence[int] = IN_ORDER) -> Tensor:
    """The 4-bit numbers of `packed` [rows, columns / 8] int32 as [rows, columns] uint8. The lowest four bits of a word
    are column order[0], the next four bits column order[1]."""
    shifts = torch.tensor([order.index(column) * 4 for column in range(8)], dtype=torch.int32)
    return (packed.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(-2)


def paired(nibbles: Tensor) -> Tensor:
    """Pack `nibbles` [out_features, in_features] uint8, numbers of 0…15, two per byte. The result
    [out_features, ceil(in_features / 2)] uint8 has the layout of Int4.data."""
    even = F.pad(nibbles, (0, nibbles.shape[1] % 2))
    return even[:, 0::2] | even[:, 1::2] << 4


def half_scales(name: str, scales: Tensor) -> Tensor:
    """Scales [out_features, groups] as float16, for Int4. Raises ModelRefused if float16 cannot represent them."""
    halves = scales.half()
    errors = (halves.float() - scales.float()).abs()
    largest = scales.abs().max().item() if scales.numel() else 0.0
    # A relative error of 2**-7 is at most an eighth of a quantisation step. Scales near 0 may lose more precision.
    allowed = (scales.float().abs() * 2.0**-7).clamp(min=1e-6 * largest)
    if not (errors <= allowed).all():
        raise ModelRefused(f"tensor {name!r} has scales beyond float16: up to {largest:g}")
    return halves


def group_size(config: Quantization, in_features: int) -> int:
    """The number of inputs per group. If the weight has only one group: in_features, rounded up to a multiple of
    32."""
    return config.group or -(-in_features // 32) * 32


def read_order(
    tensors: Tensors, name: str, config: Quantization, in_features: int, dtypes: Sequence[str]
) -> Tensor | None:
    """The permutation of the inputs, from the tensor `name`, which has the group of each input. None if the checkpoint
    has no such tensor, or if its groups are contiguous. Raises ModelRefused as `grouped` does."""
    if not config.act_order and name not in tensors:
        return None
    return grouped(name, tensors.read(name, (in_features,), dtypes), group_size(config, in_features))


def grouped(name: str, groups: Tensor, group: int) -> Tensor | None:
    """The permutation [in_features] that makes the inputs of each group contiguous; None if they are contiguous.

    `groups` [in_features] has the group of each input (activation order: Frantar et al., GPTQ, 2022). Raises
    ModelRefused if a group does not have `group` inputs.
    """
    contiguous = torch.arange(len(groups)) // group
    if torch.equal(groups.long(), contiguous):
        return None
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], contiguous):
        raise ModelRefused(f"tensor {name!r} does not assign the inputs to groups of {group}, contrary to config.json")
    return order


def sorted_inputs(weight: Int4, order: Tensor) -> Int4:
    """The weight with its inputs permuted by `order` [in_features]."""
    nibbles = torch.stack((weight.data & 15, weight.data >> 4), dim=-1).flatten(-2)[:, : weight.in_features]
    return weight._replace(data=paired(nibbles[:, order]))
