"""Random weights for a shape as a folder of config.json and safetensors.

`python scripts/bench/weights.py SHAPE FOLDER`. Only DISTINCT layers differ; the others repeat them, which saves time.
Speed is the same, as one layer of a measured model is larger than the caches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rows import parser
from shapes import SHAPES, Shape, Tensor

from localllm.engine.files.model_config import parse_config
from localllm.engine.files.model_files import ModelFiles
from localllm.engine.files.tensor_files import StoredTensor

DISTINCT = 4
SHARD = "model.safetensors"
RANDOM_VALUES = 1 << 24  # longer tensors repeat their values
STAGGER = (1 << 20) + 4096  # values between the starts of tensors in a shared file
ALIGNMENT = 64  # values


def draw(shape: Shape) -> Iterator[tuple[Tensor, NDArray[np.uint16]]]:
    """Every tensor with its values as bits of bfloat16: normally distributed, so small that activations stay finite."""
    random = np.random.default_rng(0)
    cached: dict[tuple[str, int], NDArray[np.uint16]] = {}
    for tensor in shape.tensors():
        kind = (tensor.name.split(f".{tensor.layer}.")[-1], tensor.layer % DISTINCT)
        if tensor.layer < 0 or kind not in cached:
            cached[kind] = bfloat16(_values(random, tensor))
        yield tensor, cached[kind]


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of bfloat16, rounded to nearest; ties away from zero."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def _values(random: np.random.Generator, tensor: Tensor) -> NDArray[np.float32]:
    if len(tensor.shape) == 1:
        return np.ones(tensor.shape, np.float32)
    return np.resize(_normal(random, min(tensor.size, RANDOM_VALUES), tensor.shape[-1]), tensor.shape)


def _normal(random: np.random.Generator, count: int, in_features: int) -> NDArray[np.float32]:
    """Normal values, so small that a product with `in_features` inputs stays finite."""
    return random.standard_normal(count, np.float32) / np.float32(in_features**0.5)


def write(shape: Shape, folder: Path) -> None:
    """Write config.json and one file of weights, unless the file exists."""
    if (folder / SHARD).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()), "utf-8")
    header: dict[str, object] = {}
    offset = 0
    for tensor in shape.tensors():
        for name, stored in tensor.stored():
            end = offset + 2 * prod(stored)
            header[name] = {"dtype": "BF16", "shape": stored, "data_offsets": [offset, end]}
            offset = end
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    unfinished = folder / f"{SHARD}.part"
    with unfinished.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for _, values in draw(shape):
            values.tofile(file)
    unfinished.rename(folder / SHARD)


def stand_in(shape: Shape, folder: Path, seed: int = 0) -> ModelFiles:
    """A model of random weights that needs little disk space: all tensors of one width share the values of one file,
    each from another offset. On a GPU each tensor is a copy of its own."""
    random = np.random.default_rng(seed)
    tensors: dict[str, StoredTensor] = {}
    for width in sorted({_width(tensor) for tensor in shape.tensors()}):
        same_width = [tensor for tensor in shape.tensors() if _width(tensor) == width]
        tensors |= _share(folder / f"{width}.bin", same_width, random)
    in_order = {name: tensors[name] for name in _names(shape)}
    return ModelFiles(folder, shape.name, parse_config(shape.config()), in_order, (), {})


def first_layers(files: ModelFiles, shape: Shape) -> ModelFiles:
    """The first layers of a stand_in. `shape` has fewer layers and is otherwise the same."""
    tensors = {name: files.tensors[name] for name in _names(shape)}
    return replace(files, name=shape.name, config=parse_config(shape.config()), tensors=tensors)


def _names(shape: Shape) -> list[str]:
    return [name for tensor in shape.tensors() for name, _ in tensor.stored()]


def _width(tensor: Tensor) -> int:
    """The input features of a matrix; 0 for a norm."""
    return tensor.shape[-1] if len(tensor.shape) > 1 else 0


def _share(file: Path, same_width: list[Tensor], random: np.random.Generator) -> dict[str, StoredTensor]:
    """Write the values of all matrices of one width, or of all norms. Returns the place of each tensor."""
    largest = max(tensor.size for tensor in same_width)
    width = _width(same_width[0])
    spare = min(RANDOM_VALUES, largest)
    bits = bfloat16(_normal(random, spare, width) if width else np.ones(spare, np.float32))
    with file.open("wb") as out:
        for start in range(0, largest + spare, len(bits)):
            bits[: largest + spare - start].tofile(out)
    places = {}
    for number, tensor in enumerate(same_width):
        first = number * STAGGER % (largest + spare - tensor.size + 1) // ALIGNMENT * ALIGNMENT
        start = first * 2  # bytes
        for name, stored in tensor.stored():
            end = start + 2 * prod(stored)
            places[name] = StoredTensor(file, "BF16", stored, start, end)
            start = end
    return places


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("shape", choices=SHAPES)
    arguments.add_argument("folder", type=Path)
    options = arguments.parse_args()
    write(SHAPES[options.shape], options.folder)
