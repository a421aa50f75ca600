"""Eight 4-bit numbers in an int32, as several formats store them, and what becomes of them here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ....engine.errors import ModelRefused
from ....kernels.ops.linear import Int4

IN_ORDER = range(8)


def unpacked(packed: Tensor, order: Sequence[int] = IN_ORDER) -> Tensor:
    """[rows, columns / 8] int32 -> [rows, columns] uint8: the lowest four bits are column order[0] of each eight."""
    place = torch.tensor([order.index(column) * 4 for column in range(8)], dtype=torch.int32)
    return (packed.unsqueeze(-1) >> place & 15).to(torch.uint8).flatten(-2)


def paired(nibbles: Tensor) -> Tensor:
    """[outs, ins] uint8 of 0…15 -> [outs, ceil(ins / 2)] uint8 as Int4 has them."""
    even = F.pad(nibbles, (0, nibbles.shape[1] % 2))
    return even[:, 0::2] | even[:, 1::2] << 4


def half_scales(name: str, scales: Tensor) -> Tensor:
    """Scales [outs, groups] as Int4 has them. Raises ModelRefused where float16 cannot hold them."""
    made = scales.half()
    lost = (made.float() - scales.float()).abs()
    # One of bfloat16 that float16 rounds may lose an eighth of a step; the smallest of all do not matter.
    allowed = (scales.float().abs() * 2.0**-7).clamp(min=1e-6 * scales.abs().max().item() if scales.numel() else 0.0)
    if not (lost <= allowed).all():
        raise ModelRefused(f"tensor {name!r} has scales beyond float16: up to {scales.abs().max().item():g}")
    return made


def grouped(name: str, groups: Tensor | None, group: int) -> Tensor | None:
    """The order of inputs in which those of one group lie together; None where they do so already.

    `groups` [ins] says which group each input belongs to (activation order: Frantar et al., GPTQ, 2022). Raises
    ModelRefused where groups are not of `group` inputs each.
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
    """The weight for inputs in that order."""
    nibbles = torch.stack((weight.data & 15, weight.data >> 4), dim=-1).flatten(-2)[:, : weight.ins]
    return weight._replace(data=paired(nibbles[:, order]))
