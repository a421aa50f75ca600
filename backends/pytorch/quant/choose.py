"""Which scheme a model's weights are loaded with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from ....engine.errors import ModelRefused
from ....engine.modelfiles import ModelFiles
from ....engine.quantization import Method, Quant, Quantization
from ....kernels.ops.linear import Weight
from . import Scheme, fp8, int4, int8
from .awq import Awq
from .compressed_tensors import CompressedTensors
from .floats import Floats
from .fp8_stored import Fp8Stored
from .gptq import Gptq

ON_LOAD: Mapping[Quant, Callable[[Tensor], Weight] | None] = MappingProxyType(
    {"none": None, "int8": int8.quantise, "int4": int4.quantise, "fp8": fp8.quantise}
)

STORED: Mapping[Method, Callable[[Quantization], Scheme]] = MappingProxyType(
    {"gptq": Gptq, "awq": Awq, "compressed-tensors": CompressedTensors, "fp8": Fp8Stored}
)


def scheme(quant: Quant, files: ModelFiles) -> Scheme:
    """Raises ModelRefused for weights that are to be made smaller, but already were."""
    found = files.config.quantization
    if found is None:
        return Floats(ON_LOAD[quant])
    if quant != "none":
        raise ModelRefused(
            f"{files.name}: its weights are already quantised ({found.title}) and cannot be converted to {quant}",
            "omit --quant, or use the bf16 version of the model",
        )
    return STORED[found.method](found)
