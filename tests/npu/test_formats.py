"""FRACTAL_NZ: the alignment of weights, and the warnings about weights that stay ND."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from localllm.backends.npu.formats import ALIGNMENT, NPUACLFormat, WeightFormats, is_aligned
from localllm.backends.npu.products import LINEAR
from localllm.kernels.ops.cases.moe import random_weight
from localllm.kernels.ops.linear import map_tensors, weight_tensors

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


def test_formats_have_the_numbers_of_torch_npu() -> None:
    assert {name: int(torch_npu.Format[name]) for name in ("UNDEFINED", "ND", "FRACTAL_NZ")} == {
        one.name: one.value for one in NPUACLFormat
    }


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


@pytest.mark.emulated
class TestOnNpu:
    @staticmethod
    def packed(op: str, out_features: int, in_features: int) -> Any:
        weight = random_weight(op, out_features, in_features, torch.Generator().manual_seed(1), torch.bfloat16)
        return LINEAR.pack(map_tensors(weight, lambda tensor: tensor.to("npu")), torch.bfloat16)

    @pytest.mark.parametrize("op", ["dense", "int8"])
    def test_aligned_weight_becomes_nz_with_the_same_values(self, op: str) -> None:
        packed = self.packed(op, 96, 64)
        formats = WeightFormats()
        laid_out = formats.lay_out(op, packed)
        assert torch_npu.get_npu_format(laid_out.data) == NPUACLFormat.FRACTAL_NZ
        for tensor, other in zip(weight_tensors(laid_out), weight_tensors(packed), strict=True):
            assert torch.equal(tensor.cpu(), other.cpu())
        assert not formats.warnings()

    @pytest.mark.parametrize(
        ("op", "out_features", "warning"),
        [
            ("dense", 24, "2 weights are ND: 64 x 24 is not aligned (slower)"),
            ("int8", 48, "2 weights are ND: 64 x 48 is not aligned (slower)"),
            ("fp8", 64, "2 weights in fp8 are computed by references (slower)"),
            ("mxfp4", 64, "2 weights in mxfp4 are computed by references (slower)"),
        ],
    )
    def test_other_weights_stay_and_are_counted(self, op: str, out_features: int, warning: str) -> None:
        formats = WeightFormats()
        for _ in range(2):
            packed = self.packed(op, out_features, 64)
            assert formats.lay_out(op, packed) is packed
        assert formats.warnings() == (warning,)

    def test_int4_stays_nd_without_a_warning(self) -> None:
        formats = WeightFormats()
        packed = self.packed("int4", 64, 64)
        assert formats.lay_out("int4", packed) is packed
        assert not formats.warnings()

    def test_plain_turns_nz_off(self) -> None:
        formats = WeightFormats(plain=True)
        packed = self.packed("dense", 64, 64)
        assert formats.lay_out("dense", packed) is packed
        assert formats.warnings() == ("1 weights are ND: weight_layout is plain (slower)",)
