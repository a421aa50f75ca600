"""FRACTAL_NZ: the alignment of weights, and the warnings about weights that stay ND."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from torch import Tensor

from localllm.backends.npu.formats import ALIGNMENT, NPUACLFormat, WeightFormats, is_aligned

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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_samples_pass_unchanged_and_uncounted(device: str) -> None:
    weight = torch.empty(16, 17, dtype=torch.bfloat16, device=device)
    formats = WeightFormats()
    assert formats.lay_out(weight) is weight
    assert formats.warning() == ""


@pytest.mark.emulated
class TestOnNpu:
    def test_aligned_weight_becomes_nz_with_the_same_values(self) -> None:
        weight = torch.randn(32, 48).bfloat16()
        formats = WeightFormats()
        cast = formats.lay_out(weight.to("npu"))
        assert torch_npu.get_npu_format(cast) == NPUACLFormat.FRACTAL_NZ
        assert torch.equal(cast.cpu(), weight)
        assert formats.warning() == ""

    def test_other_weights_stay_nd_and_are_named(self) -> None:
        formats = WeightFormats()
        for columns in (24, 24, 16):
            weight = torch.ones(32, columns, dtype=torch.bfloat16, device="npu")
            laid_out = formats.lay_out(weight)
            assert (laid_out is weight) == (columns == 24)
        assert formats.warning() == "slower weights: 2 weights are ND: 32 x 24 is not aligned"

    def test_plain_turns_nz_off(self) -> None:
        formats = WeightFormats(plain=True)
        weight = torch.ones(32, 16, dtype=torch.bfloat16, device="npu")
        assert formats.lay_out(weight) is weight
        assert formats.warning() == "slower weights: 1 weights are ND: weight_layout is plain"
