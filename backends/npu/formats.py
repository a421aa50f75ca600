"""The memory formats of weights: FRACTAL_NZ, which the matrix unit reads, or ND (row-major).

FRACTAL_NZ stores a matrix as tiles of 16 rows and 32 bytes, one column of tiles after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

import torch
from torch import Tensor


class NPUACLFormat(IntEnum):
    """The numbers of CANN's formats (aclFormat)."""

    UNDEFINED = -1
    ND = 2
    FRACTAL_NZ = 29


# dtype -> (in_features, out_features): FRACTAL_NZ needs multiples of them. int32 words hold eight int4 outputs each.
ALIGNMENT: Mapping[torch.dtype, tuple[int, int]] = MappingProxyType(
    {torch.bfloat16: (16, 16), torch.float16: (16, 16), torch.int8: (16, 32), torch.int32: (16, 64 // 8)}
)


def is_aligned(weight: Tensor) -> bool:
    """Whether a weight [..., in_features, out_features] may be FRACTAL_NZ."""
    rows, columns = ALIGNMENT.get(weight.dtype, (0, 0))
    return bool(rows) and weight.shape[-2] % rows == 0 and weight.shape[-1] % columns == 0


class WeightFormats:
    """Chooses the formats of a model's weights, and counts those that are slower than they could be."""

    def __init__(self, plain: bool = False) -> None:
        """`plain`: all weights stay ND."""
        self._plain = plain
        self._slower: Counter[str] = Counter()  # end of a sentence about weights -> their number

    def lay_out(self, weight: Tensor) -> Tensor:
        """The weight [..., in_features, out_features], in FRACTAL_NZ if its shape allows it. Tensors of other devices
        (samples on the CPU) stay unchanged."""
        if weight.device.type != "npu":
            return weight
        if self._plain or not is_aligned(weight):
            shape = " x ".join(map(str, weight.shape[-2:]))
            self.count_slower("are ND: weight_layout is plain" if self._plain else f"are ND: {shape} is not aligned")
            return weight
        cast: Tensor = torch.ops.npu.npu_format_cast(weight, int(NPUACLFormat.FRACTAL_NZ))
        return cast

    def count_slower(self, reason: str) -> None:
        """Count a weight; `reason` ends the sentence "N weights ..."."""
        self._slower[reason] += 1

    def warning(self) -> str:
        """A sentence about the weights that are slower than they could be, for the warnings of a load; empty if there
        are none."""
        listed = [f"{count} weights {reason}" for reason, count in sorted(self._slower.items())]
        return f"slower weights: {'; '.join(listed)}" if listed else ""
