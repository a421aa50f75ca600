"""The memory formats of weights: FRACTAL_NZ, which the matrix unit reads, or ND (row-major).

FRACTAL_NZ stores a matrix as tiles of 16 rows and 32 bytes, one column of tiles after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .products import MAX_WIDTH, Columns, Dense, Int8Columns


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

    def lay_out(self, op: str, weight: Any) -> Any:
        """A packed weight of the product `op`, in FRACTAL_NZ if that is possible. int4 weights stay ND: their products
        read FRACTAL_NZ only in graphs that CANN compiles."""
        if isinstance(weight, Dense | Int8Columns):
            reason = self._reason_for_nd(weight)
            if not reason:
                data = torch.ops.npu.npu_format_cast(weight.data, int(NPUACLFormat.FRACTAL_NZ))
                weight = weight._replace(data=data)
            self._count(reason and f"are ND: {reason}")
        if isinstance(weight, Dense) and op != "dense":
            self._count("of experts are floats: their sizes have no int4 product")
        if not isinstance(weight, Columns | Tensor):
            self._count(f"in {op} are computed by references")
        return weight

    def _reason_for_nd(self, weight: Dense | Int8Columns) -> str:
        if self._plain:
            return "weight_layout is plain"
        if isinstance(weight, Int8Columns) and weight.blocks > 1:
            return f"more than {MAX_WIDTH} outputs"
        shape = " x ".join(map(str, weight.data.shape[-2:]))
        return "" if is_aligned(weight.data) else f"{shape} is not aligned"

    def _count(self, reason: str) -> None:
        if reason:
            self._slower[reason] += 1

    def warnings(self) -> tuple[str, ...]:
        """Sentences about the weights that are slower than they could be, for the user."""
        return tuple(f"{count} weights {reason} (slower)" for reason, count in sorted(self._slower.items()))
