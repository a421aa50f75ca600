"""Random weights for a shape, in files that need little disk space; and random adapters."""

from __future__ import annotations

import json
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from shapes import Shape, Tensor

from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_config import parse_config
from localllm.engine.files.model_files import ModelFiles
from localllm.engine.files.tensor_files import StoredTensor
from localllm.engine.lora import Adapter

RANDOM_VALUES = 1 << 24  # longer tensors repeat their values
STAGGER = (1 << 20) + 4096  # values between the starts of tensors in a shared file
ALIGNMENT = 64  # values


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of bfloat16, rounded to nearest; ties away from zero."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def stand_in(shape: Shape, folder: Path, seed: int = 0) -> ModelFiles:
    """A model of random weights. All tensors of one width share the values of one file, each from another offset. A
    backend copies the values while it packs them, so in memory each tensor has its own.

    Files that exist in the folder are used again."""
    tensors: dict[str, StoredTensor] = {}
    for (width, fill), alike in groupby(sorted(shape.tensors(), key=_values), _values):
        tensors |= _share(folder / f"{seed}-{width}-{fill:g}.bin", list(alike), seed)
    (folder / "config.json").write_text(json.dumps(shape.config()), "utf-8")
    return _model(shape, folder, tensors)


def first_layers(files: ModelFiles, shape: Shape) -> ModelFiles:
    """The first layers of a stand_in. `shape` has fewer layers and is otherwise the same."""
    return _model(shape, files.path, dict(files.tensors))


def _model(shape: Shape, folder: Path, tensors: dict[str, StoredTensor]) -> ModelFiles:
    in_order = {name: tensors[name] for tensor in shape.tensors() for name, _ in tensor.stored()}
    return ModelFiles(folder, shape.name, parse_config(shape.config()), in_order, (), {})


def _values(tensor: Tensor) -> tuple[int, float]:
    """(input features, 0) of a matrix; (0, the values) of a vector."""
    return (tensor.shape[-1], 0.0) if len(tensor.shape) > 1 else (0, tensor.fill)


def _share(file: Path, alike: list[Tensor], seed: int) -> dict[str, StoredTensor]:
    """Write the values of all matrices of one width, or of vectors with equal values. Returns the place of each
    tensor."""
    largest = max(tensor.size for tensor in alike)
    spare = min(RANDOM_VALUES, largest)
    if not file.exists():
        _write(file, *_values(alike[0]), spare, largest + spare, seed)
    places = {}
    for number, tensor in enumerate(alike):
        first = number * STAGGER % (largest + spare - tensor.size + 1) // ALIGNMENT * ALIGNMENT
        start = first * 2  # bytes
        for name, stored in tensor.stored():
            end = start + 2 * prod(stored)
            places[name] = StoredTensor(file, "BF16", stored, start, end)
            start = end
    return places


def _write(file: Path, width: int, fill: float, values: int, length: int, seed: int) -> None:
    """Write `length` numbers by repeating `values` numbers: `fill` for width 0, else normal values, so small that a
    product with `width` inputs stays finite."""
    random = np.random.default_rng([seed, width])
    numbers = np.full(values, fill, "f4")
    if width:
        numbers = random.standard_normal(values, np.float32) / np.float32(width**0.5)
    bits = bfloat16(numbers)
    part = file.with_suffix(".part")
    with part.open("wb") as out:
        for start in range(0, length, len(bits)):
            bits[: length - start].tofile(out)
    part.rename(file)


def write_adapter(shape: Shape, rank: int, folder: Path) -> Adapter:
    """Random factors for every linear layer outside the experts, as PEFT writes them. A folder that exists is used."""
    if not folder.exists():
        _write_factors(shape, rank, folder)
    return Adapter(folder.name, str(folder), read_adapter(folder).version)


def _write_factors(shape: Shape, rank: int, folder: Path) -> None:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {}
    for tensor in shape.tensors():
        if tensor.layer >= 0 and tensor.name.endswith("_proj.weight") and len(tensor.shape) == 2:
            out_features, in_features = tensor.shape
            module = f"base_model.model.{tensor.name.removesuffix('.weight')}"
            factors[f"{module}.lora_A.weight"] = torch.randn(rank, in_features).bfloat16() * 0.01
            factors[f"{module}.lora_B.weight"] = torch.randn(out_features, rank).bfloat16() * 0.01
    save_file(factors, folder / "adapter_model.safetensors")
