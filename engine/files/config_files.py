"""config.json, and the files of quantisation programs that complete it.

quantize_config.json    AutoGPTQ, before it wrote config.json
quant_config.json       AutoAWQ, before it wrote config.json
hf_quant_config.json    NVIDIA ModelOpt
quant_model_description.json, …_w8a8.json, …_w8a8_dynamic.json    Ascend's msModelSlim
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .fields import Fields
from .json_files import read_json

CONFIG = "config.json"
GPTQ = "quantize_config.json"
AWQ = "quant_config.json"
MODELOPT = "hf_quant_config.json"
MODELSLIM = tuple(f"quant_model_description{end}.json" for end in ("", "_w8a8", "_w8a8_dynamic"))
CONFIG_FILES = (
    CONFIG,
    GPTQ,
    AWQ,
    MODELOPT,
    *MODELSLIM,
)  # all files that decide about the architecture and the weight format
_QUANTISED = ("quantization_config", "compression_config", "quantization")  # fields of config.json
# Field of quant_config.json -> the field of quantization_config with the same meaning.
_AWQ_FIELDS = {"w_bit": "bits", "q_group_size": "group_size"}


def read_config(folder: Path) -> Mapping[str, Any]:
    """The values of config.json. If it does not name a weight format, quantization_config is that of another file.
    Raises ModelRefused."""
    values = read_json(folder / CONFIG)
    if any(values.get(key) is not None for key in _QUANTISED):
        return values
    quantization = _quantization(folder)
    return {**values, "quantization_config": quantization} if quantization else values


def _quantization(folder: Path) -> dict[str, Any]:
    """The weight format in a file beside config.json; empty if there is none."""
    present = {file.name for file in folder.iterdir()}
    if GPTQ in present:
        return {"quant_method": "gptq", **read_json(folder / GPTQ)}
    if AWQ in present:
        values = read_json(folder / AWQ)
        return {"quant_method": "awq", **{_AWQ_FIELDS.get(key, key): value for key, value in values.items()}}
    if MODELOPT in present:
        table = Fields(read_json(folder / MODELOPT), MODELOPT).table("quantization")
        return {"quant_method": "modelopt", **{key: table.get(key) for key in table}}
    description = next((name for name in MODELSLIM if name in present), "")
    return {"quant_method": "modelslim", **read_json(folder / description)} if description else {}
