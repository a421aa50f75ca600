"""Which scheme a model's weights are loaded with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from ....engine.runner import Quant
from ....kernels.ops.linear import Weight
from . import Scheme, fp8, int4, int8
from .floats import Floats

ON_LOAD: Mapping[Quant, Callable[[Tensor], Weight] | None] = MappingProxyType(
    {"none": None, "int8": int8.quantise, "int4": int4.quantise, "fp8": fp8.quantise}
)


def scheme(quant: Quant) -> Scheme:
    return Floats(ON_LOAD[quant])
