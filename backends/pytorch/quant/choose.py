"""Selects the scheme that loads the weights of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from ....engine.errors import SettingRefused
from ....engine.files.model_files import ModelFiles
from ....engine.files.quantization import Method, Quant, Quantization
from ....kernels.ops.linear import Weight
from . import Scheme, fp8, int4, int8
from .awq import Awq
from .compressed_tensors import CompressedTensors
from .floats import Floats
from .fp8_stored import Fp8Stored
from .gptq import Gptq
from .modelslim import Modelslim
from .mxfp4 import Mxfp4Stored

ON_LOAD: Mapping[Quant, Callable[[Tensor], Weight] | None] = MappingProxyType(
    {
        "none": None,
        "int8": int8.quantise,
        "int4": int4.quantise,
        "fp8": fp8.quantise,
        "fp8_w8a8": fp8.quantise_w8a8,
    }
)

STORED: Mapping[Method, Callable[[Quantization], Scheme]] = MappingProxyType(
    {"gptq": Gptq, "awq": Awq, "compressed-tensors": CompressedTensors, "fp8": Fp8Stored, "mxfp4": Mxfp4Stored}
)


def scheme(quant: Quant, files: ModelFiles, device: str, static: bool = False) -> Scheme:
    """The scheme for `quant` and the files; `device` is the torch type of the device that quantises floats, `static` is
    Device.static_inputs. Raises SettingRefused if `quant` is set and the weights are quantised."""
    stored = files.config.quantization
    if stored is None:
        return Floats(ON_LOAD[quant], device)
    if quant != "none":
        raise SettingRefused(
            f"{files.name}: its weights are already quantised ({stored.title}) and cannot be converted to {quant}",
            "omit --quant, or use the bf16 version of the model",
            setting="quant",
        )
    return Modelslim(static) if stored.method == "modelslim" else STORED[stored.method](stored)
