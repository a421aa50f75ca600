"""FRACTAL_NZ: the alignment of weights, and samples on the CPU. tests/npu has the tests on NPU tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localllm.backends.npu.formats import ALIGNMENT, is_aligned
from localllm.backends.npu.products import LINEAR
from localllm.kernels.ops.cases.moe import random_weight
from localllm.kernels.ops.linear import weight_tensors

TILE_ROWS = 16
TILE_BYTES = 32
SHAPES = [(rows, columns) for rows in (1, 8, 16, 24, 48) for columns in (1, 7, 8, 16, 24, 32, 40, 64)]


def tiled(weight: Tensor) -> Tensor:
    """FRACTAL_NZ of a matrix, flat, with zeros where the last tiles are incomplete."""
    rows, columns = weight.shape
    width = TILE_BYTES // weight.itemsize
    padded = weight.new_zeros(-(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // width) * width)
    padded[:rows, :columns] = weight
    return padded.unflatten(0, (-1, TILE_ROWS)).unflatten(2, (-1, width)).permute(2, 0, 1, 3).flatten()


def untiled(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Each element by its address: the tile in a column of tiles, then the row in the tile."""
    width = TILE_BYTES // flat.itemsize
    row = torch.arange(rows).unsqueeze(1)
    column = torch.arange(columns)
    tiles = -(-rows // TILE_ROWS)
    tile = column // width * tiles + row // TILE_ROWS
    return flat[tile * TILE_ROWS * width + row % TILE_ROWS * width + column % width]


@pytest.mark.parametrize("dtype", ALIGNMENT)
def test_aligned_weights_are_those_whose_tiles_are_complete(dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        weight = torch.randint(-100, 100, (rows, columns)).to(dtype)
        flat = tiled(weight)
        assert torch.equal(untiled(flat, rows, columns), weight)
        assert is_aligned(weight) == (len(flat) == rows * columns), (rows, columns)


@pytest.mark.parametrize(
    ("dtype", "shape", "aligned"),
    [
        (torch.bfloat16, (48, 16), True),
        (torch.bfloat16, (8, 48, 16), True),
        (torch.bfloat16, (48, 24), False),
        (torch.float16, (40, 16), False),
        (torch.int8, (16, 32), True),
        (torch.int8, (16, 48), False),
        (torch.int32, (16, 64 // 8), True),
        (torch.int32, (16, 32 // 8), False),
        (torch.float32, (16, 16), False),
    ],
)
def test_alignment_depends_on_the_dtype(dtype: torch.dtype, shape: tuple[int, ...], aligned: bool) -> None:
    assert is_aligned(torch.empty(shape, dtype=dtype)) is aligned


@pytest.mark.parametrize("op", ["dense", "int8", "int4"])
def test_samples_on_the_cpu_are_packed_without_a_format(op: str) -> None:
    """A load estimates its memory with samples, which only a device that has formats lays out."""
    weight = random_weight(op, 64, 64, torch.Generator().manual_seed(1), torch.bfloat16)
    packed = LINEAR.pack(weight, torch.bfloat16)
    assert all(tensor.device.type == "cpu" for tensor in weight_tensors(packed))
