"""The formats of stored weights that mlx-lm reads, or that weights.py decodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.errors import ModelRefused
from ...engine.files.fields import Fields
from ...engine.files.quantization import Quantization, parse_quantization
from ...engine.files.tensor_files import StoredTensor


def quantization(values: Mapping[str, Any]) -> Quantization | None:
    """The weight format that config.json names. Raises ModelRefused for a format that the engine does not know."""
    text = values.get("text_config")
    parts = [values, text] if isinstance(text, dict) else [values]
    parsed = (parse_quantization(Fields(part, "config.json")) for part in parts)
    return next((found for found in parsed if found is not None), None)


def refusal(values: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    """The reason why MLX cannot load weights of this format; empty if it can. `tensors`: those of the files."""
    try:
        stored = quantization(values)
    except ModelRefused as error:
        return str(error)
    if stored is not None and not _is_readable(stored, values):
        return f"mlx-lm does not read weights in the format {stored.title}"
    decoded = {"F8_E4M3"} if stored is not None and stored.format == "fp8" else set()
    for name, tensor in tensors.items():
        if tensor.dtype.startswith("F8_") and tensor.dtype not in decoded:
            return f"the tensor {name:.100} has the type {tensor.dtype}, which MLX reads as integers"
    return ""


def _is_readable(stored: Quantization, values: Mapping[str, Any]) -> bool:
    if stored.method == "mxfp4":  # only this class unpacks the blocks of experts
        return values.get("model_type") == "gpt_oss"
    return stored.method in ("foreign", "awq") or stored.format == "fp8"
