"""Random weights for a shape as a folder of config.json and safetensors.

`python scripts/bench/weights.py SHAPE FOLDER`. Layers repeat after DISTINCT of them, which saves time and changes
nothing: a single layer of a model that is worth measuring is larger than the caches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from shapes import SHAPES, Shape, Tensor

from localllm.engine.modelconfig import parse_config
from localllm.engine.modelfiles import ModelFiles
from localllm.engine.tensorfiles import StoredTensor

DISTINCT = 4
SHARD = "model.safetensors"
DRAWN = 1 << 24  # values of a kind that differ
STAGGER = (1 << 20) + 4096  # values: how far apart tensors begin that share their numbers
ALIGNED = 64  # values


def draw(shape: Shape) -> Iterator[tuple[Tensor, NDArray[np.uint16]]]:
    """Every tensor with its values, the bits of bfloat16: normal, of a size that keeps activations finite."""
    random = np.random.default_rng(0)
    kept: dict[tuple[str, int], NDArray[np.uint16]] = {}
    for tensor in shape.tensors():
        kind = (tensor.name.split(f".{tensor.layer}.")[-1], tensor.layer % DISTINCT)
        if tensor.layer < 0 or kind not in kept:
            kept[kind] = bfloat16(_values(random, tensor))
        yield tensor, kept[kind]


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest; halves away from zero will do here."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def _values(random: np.random.Generator, tensor: Tensor) -> NDArray[np.float32]:
    if len(tensor.shape) == 1:
        return np.ones(tensor.shape, np.float32)
    return np.resize(_normal(random, min(tensor.size, DRAWN), tensor.shape[-1]), tensor.shape)


def _normal(random: np.random.Generator, count: int, ins: int) -> NDArray[np.float32]:
    """Of a size that keeps activations finite where `ins` of them are multiplied and added up."""
    return random.standard_normal(count, np.float32) / np.float32(ins**0.5)


def write(shape: Shape, folder: Path) -> None:
    """config.json and one file of weights; left alone if it is there already."""
    if (folder / SHARD).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()), "utf-8")
    header: dict[str, object] = {}
    offset = 0
    for tensor in shape.tensors():
        end = offset + 2 * tensor.size
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, end]}
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
    """A model to open like any other, of which next to nothing is written: tensors of one width share the numbers of
    one file there, each from another place on. What holds them on a device of its own has a copy of each."""
    random = np.random.default_rng(seed)
    tensors: dict[str, StoredTensor] = {}
    for width in sorted({_width(tensor) for tensor in shape.tensors()}):
        alike = [tensor for tensor in shape.tensors() if _width(tensor) == width]
        tensors |= _share(folder / f"{width}.bin", alike, random)
    in_order = {tensor.name: tensors[tensor.name] for tensor in shape.tensors()}
    return ModelFiles(folder, shape.name, parse_config(shape.config()), in_order, (), {})


def first_layers(files: ModelFiles, shape: Shape) -> ModelFiles:
    """Of a stand-in for a shape with more layers, but the same otherwise."""
    tensors = {tensor.name: files.tensors[tensor.name] for tensor in shape.tensors()}
    return replace(files, name=shape.name, config=parse_config(shape.config()), tensors=tensors)


def _width(tensor: Tensor) -> int:
    """How many numbers are added up in a product; 0 for a norm."""
    return tensor.shape[-1] if len(tensor.shape) == 2 else 0


def _share(file: Path, alike: list[Tensor], random: np.random.Generator) -> dict[str, StoredTensor]:
    """Matrices of one width, or all norms: their numbers written, and where each finds its own."""
    largest, width = max(tensor.size for tensor in alike), _width(alike[0])
    spare = min(DRAWN, largest)
    bits = bfloat16(_normal(random, spare, width) if width else np.ones(spare, np.float32))
    with file.open("wb") as out:
        for start in range(0, largest + spare, len(bits)):
            bits[: largest + spare - start].tofile(out)
    places = {}
    for number, tensor in enumerate(alike):
        first = number * STAGGER % (largest + spare - tensor.size + 1) // ALIGNED * ALIGNED
        start = first * 2  # bytes
        places[tensor.name] = StoredTensor(file, "BF16", tensor.shape, start, start + 2 * tensor.size)
    return places


if __name__ == "__main__":
    write(SHAPES[sys.argv[1]], Path(sys.argv[2]))
