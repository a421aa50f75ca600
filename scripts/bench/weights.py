"""Random weights for a shape as a folder of config.json and safetensors.

`python scripts/bench/weights.py SHAPE FOLDER`. Layers repeat after DISTINCT of them, which saves time and changes
nothing: a single layer of a model that is worth measuring is larger than the caches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from shapes import SHAPES, Shape, Tensor

DISTINCT = 4
SHARD = "model.safetensors"


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
    values = random.standard_normal(min(tensor.size, 1 << 24), np.float32) / np.float32(tensor.shape[-1] ** 0.5)
    return np.resize(values, tensor.shape)


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


if __name__ == "__main__":
    write(SHAPES[sys.argv[1]], Path(sys.argv[2]))
