"""Converts the layout of several formats, eight 4-bit numbers in an int32, to the layout of Int4."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ....engine.errors import ModelRefused
from ....kernels.ops.linear import Int4

IN_ORDER = range(8)


def unpacked(packed: Tensor, order: Sequence[int] = IN_ORDER) -> Tensor:
    """[rows, columns / 8] int32 -> [rows, columns] uint8: the lowest four bits of a word are column order[0]."""
    place = torch.tensor([order.index(column) * 4 for column in range(8)], dtype=torch.int32)
    return (packed.unsqueeze(-1) >> place & 15).to(torch.uint8).flatten(-2)


def paired(nibbles: Tensor) -> Tensor:
    """[out_features, in_features] uint8 of 0…15 -> [out_features, ceil(in_features / 2)] uint8, as Int4.data."""
    even = F.pad(nibbles, (0, nibbles.shape[1] % 2))
    return even[:, 0::2] | even[:, 1::2] << 4


def half_scales(name: str, scales: Tensor) -> Tensor:
    """Scales [out_features, groups] as float16, for Int4. Raises ModelRefused if float16 cannot represent them."""
    halves = scales.half()
    errors = (halves.float() - scales.float()).abs()
    # An error of 2**-7 is at most an eighth of a quantisation step. Scales near 0 may lose more: they matter little.
    allowed = (scales.float().abs() * 2.0**-7).clamp(min=1e-6 * scales.abs().max().item() if scales.numel() else 0.0)
    if not (errors <= allowed).all():
        raise ModelRefused(f"tensor {name!r} has scales beyond float16: up to {scales.abs().max().item():g}")
    return halves


def grouped(name: str, groups: Tensor | None, group: int) -> Tensor | None:
    """The permutation [in_features] that makes the inputs of each group contiguous; None if they are contiguous.

    `groups` [in_features] is the group of each input (activation order: Frantar et al., GPTQ, 2022). Raises
    ModelRefused if a group does not have `group` inputs.
    """
    if groups is None:
        return None
    natural = torch.arange(len(groups)) // group
    if torch.equal(groups.long(), natural):
        return None
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], natural):
        raise ModelRefused(f"tensor {name!r} does not assign the inputs to groups of {group}, contrary to config.json")
    return order


def sorted_inputs(weight: Int4, order: Tensor) -> Int4:
    """The weight with its inputs permuted by `order` [in_features]."""
    nibbles = torch.stack((weight.data & 15, weight.data >> 4), dim=-1).flatten(-2)[:, : weight.in_features]
    return weight._replace(data=paired(nibbles[:, order]))
