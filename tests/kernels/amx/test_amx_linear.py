"""Products with AMX tiles against float64, for shapes that are not multiples of a tile.

The tests pack weights by the definition in kernels/cpu/products/layout.h, so they test the layout as well.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from localllm.kernels.ops.cases.linear_mxfp4 import random_mxfp4
from localllm.kernels.ops.linear_fp8 import Fp8
from localllm.kernels.ops.linear_int4 import Int4
from localllm.kernels.ops.linear_int8 import Int8
from localllm.kernels.ops.linear_mxfp4 import Mxfp4

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMATS = {"bf16": 1, "int8": 3, "int4": 4, "fp8": 5, "mxfp4": 6}
ROWS = [16, 31, 32, 33, 257]
SHAPES = [(64, 96), (37, 70), (1, 1), (300, 1100)]  # out_features, in_features


def padded(x: Tensor, dim: int, to: int) -> Tensor:
    missing = -x.shape[dim] % to
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim) if missing else x


def interleaved(data: Tensor, by: int, to: int) -> Tensor:
    """[out_features, in_features] -> [panels, in_features / by, 32, by], padded with zeros."""
    data = padded(padded(data, 0, 32), 1, to)
    return data.unflatten(0, (-1, 32)).unflatten(2, (-1, by)).permute(0, 2, 1, 3).contiguous()


def raw(x: Tensor) -> Tensor:
    """[panels, bytes] of a tensor [panels, ...]."""
    return x.contiguous().view(torch.uint8).flatten(1)


def pack_int8(weight: Int8) -> Tensor:
    data = interleaved(weight.data, 4, 64)
    sums = padded(weight.data.int().sum(1, dtype=torch.int32), 0, 32).view(-1, 32)
    scales = padded(weight.scale, 0, 32).view(-1, 32)
    return torch.cat([raw(data), raw(sums), raw(scales)], 1)


def pack_int4(weight: Int4) -> Tensor:
    nibbles = torch.stack((weight.data & 15, weight.data >> 4), -1).flatten(1)[:, : weight.in_features]
    scales, zeros = (padded(part, 0, 32).unflatten(0, (-1, 32)) for part in (weight.scale, weight.zero))
    data = interleaved(nibbles, 4, weight.group)  # [panels, k/4, 32, 4]
    joined = (data[:, :, :16] | data[:, :, 16:] << 4).unflatten(1, (-1, weight.group // 4)).flatten(2)
    parts = [
        torch.cat([raw(scales[:, :, group]), zeros[:, :, group], joined[:, group]], 1)
        for group in range(scales.shape[2])
    ]
    return torch.cat(parts, 1)


def pack_mxfp4(weight: Mxfp4) -> Tensor:
    data = interleaved(weight.numbers, 4, 32)  # [panels, k/4, 32, 4]
    joined = (data[:, :, :16] | data[:, :, 16:] << 4).unflatten(1, (-1, 8)).flatten(2)
    exponents = padded(weight.exponent, 0, 32).unflatten(0, (-1, 32)).transpose(1, 2)
    return torch.cat([exponents, joined], 2).flatten(1)


def pack_fp8(weight: Fp8) -> Tensor:
    group = -(-weight.group // 32) * 32
    data = interleaved(weight.data.view(torch.uint8), 2, group).unflatten(1, (-1, group // 2)).flatten(2)
    scales = padded(weight.scale, 0, 32).unflatten(0, (-1, 32))
    return torch.cat([torch.cat([raw(scales[:, :, g]), data[:, g]], 1) for g in range(scales.shape[2])], 1)


def run(
    tiles: ctypes.CDLL,
    form: str,
    x: Tensor,
    packed: Tensor,
    out_features: int,
    group: int = 0,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    wide: bool = False,
    workers: int = 3,
) -> tuple[Tensor, int]:
    """(out, threads whose work used AVX-512). x and out lie in wider tensors full of NaN."""
    rows, in_features = x.shape
    room = torch.full((rows, in_features + 3), torch.nan).to(x.dtype)
    room[:, :in_features] = x
    out = torch.full((rows, out_features + 5), torch.nan).to(dtype)
    aligned = torch.empty(packed.numel() + 64, dtype=torch.uint8)
    start = -aligned.data_ptr() % 64
    aligned[start : start + packed.numel()] = packed.flatten()
    numbers = (rows, out_features, in_features, group, room.stride(0), out.stride(0))
    handed = tiles.run_linear(
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(room.data_ptr()),
        ctypes.c_void_p(aligned.data_ptr() + start),
        ctypes.c_void_p(None if bias is None else bias.data_ptr()),
        TYPES[dtype],
        TYPES[x.dtype],
        FORMATS[form],
        *map(ctypes.c_int64, numbers),
        ctypes.c_bool(wide),
        workers,
    )
    assert out[:, out_features:].isnan().all(), "wrote beyond its columns"
    return out[:, :out_features], handed


def rounded(x: Tensor, group: int) -> Tensor:
    """x [rows, in_features] rounded to int8 in groups of inputs, in float64. Uses a true division, because a product
    with a reciprocal may round a tie to the other side."""
    grouped = padded(x.float(), 1, group).unflatten(1, (-1, group))
    largest = grouped.abs().amax(-1, keepdim=True)
    whole = (grouped * (torch.full_like(largest, 127.0) / largest)).round().nan_to_num()
    return (whole.double() * (largest / 127.0).double()).flatten(1)[:, : x.shape[1]]


def near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=tolerance * expected.abs().max().item())


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int4_weight(out_features: int, in_features: int, group: int) -> Int4:
    generator = torch.Generator().manual_seed(out_features + in_features)
    groups = -(-in_features // group)
    data = torch.randint(0, 256, (out_features, -(-in_features // 2)), generator=generator).to(torch.uint8)
    if in_features % 2:
        data[:, -1] &= 15
    scale = (torch.rand(out_features, groups, generator=generator) / (4.0 * in_features**0.5)).half()
    zero = torch.randint(0, 17, (out_features, groups), generator=generator).to(torch.uint8)
    return Int4(data, scale, zero, group, in_features)


def fp8_weight(out_features: int, in_features: int, group: int) -> Fp8:
    data = (random(out_features, in_features, seed=2) * 100.0).clamp(-448.0, 448.0)
    data[:, ::7] /= 2.0**14  # subnormal
    scale = random(out_features, -(-in_features // group), seed=3).abs() / (100.0 * in_features**0.5)
    return Fp8(data.to(torch.float8_e4m3fn), scale, group)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_bf16(tiles: ctypes.CDLL, rows: int, out_features: int, in_features: int) -> None:
    x, weight, bias = (
        random(rows, in_features).bfloat16(),
        random(out_features, in_features, seed=2).bfloat16(),
        random(out_features, seed=3),
    )
    found, handed = run(tiles, "bf16", x, raw(interleaved(weight, 2, 32)), out_features, bias=bias)
    assert handed == 0
    near(found, x.double() @ weight.double().T + bias.double(), 2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("x_type", TYPES)
def test_int8(tiles: ctypes.CDLL, rows: int, out_features: int, in_features: int, x_type: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(-128, 128, (out_features, in_features), generator=generator).to(torch.int8)
    weight = Int8(data, torch.rand(out_features, generator=generator) / (64.0 * in_features**0.5))
    x, bias = random(rows, in_features).to(x_type), random(out_features, seed=3)
    x[1] = 0.0
    found, handed = run(tiles, "int8", x, pack_int8(weight), out_features, bias=bias)
    assert handed == 0
    dense = Int8(data, weight.scale.double()).dense()
    near(found, rounded(x, in_features) @ dense.T + bias.double(), 2e-6)


@pytest.mark.parametrize("rows", ROWS[1:])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize(
    ("group", "wide"), [(32, False), (32, True), (64, False), (96, False), (128, True), (1024, False)]
)
def test_int4(tiles: ctypes.CDLL, rows: int, out_features: int, in_features: int, group: int, wide: bool) -> None:
    weight = int4_weight(out_features, in_features, group)
    x = random(rows, in_features).bfloat16()
    x[1, :group] = 0.0
    found, handed = run(tiles, "int4", x, pack_int4(weight), out_features, group=group, wide=wide)
    assert handed == 0
    dense = weight._replace(scale=weight.scale.double()).dense()
    near(found, (x.double() if wide else rounded(x, group)) @ dense.T, 3e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("out_features", "in_features", "group"),
    [(33, 384, 128), (64, 300, 128), (40, 70, 70), (300, 1100, 1100), (29, 37, 37)],
)
def test_fp8(tiles: ctypes.CDLL, rows: int, out_features: int, in_features: int, group: int) -> None:
    weight, x = fp8_weight(out_features, in_features, group), random(rows, in_features).bfloat16()
    found, handed = run(tiles, "fp8", x, pack_fp8(weight), out_features, group=group)
    assert handed == 0
    near(found, x.double() @ weight._replace(scale=weight.scale.double()).dense().T, 2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out_features", "in_features"), [(33, 384), (64, 32), (40, 96), (300, 4512)])
def test_mxfp4(tiles: ctypes.CDLL, rows: int, out_features: int, in_features: int) -> None:
    """Blocks without weights have exponent 0."""
    weight = random_mxfp4(out_features, in_features, torch.Generator().manual_seed(out_features))
    weight.data[1, :16] = 0
    weight.exponent[1, 0] = 0
    x = random(rows, in_features).bfloat16()
    found, handed = run(tiles, "mxfp4", x, pack_mxfp4(weight), out_features, group=32)
    assert handed == 0
    near(found, x.double() @ weight.dense().double().T, 2e-6)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "int4_wide", "fp8", "fp8_blocks"])
def test_sums_continue_between_chunks_of_inputs(tiles: ctypes.CDLL, form: str) -> None:
    x, out_features, in_features = random(257, 4511).bfloat16(), 96, 4511
    if form == "bf16":
        weight = random(out_features, in_features, seed=2).bfloat16()
        found, _ = run(tiles, "bf16", x, raw(interleaved(weight, 2, 32)), out_features, workers=1)
        expected = x.double() @ weight.double().T
    elif form == "int8":
        data = torch.randint(-128, 128, (out_features, in_features), generator=torch.Generator().manual_seed(5)).to(
            torch.int8
        )
        whole = Int8(data, torch.ones(out_features))
        found, _ = run(tiles, "int8", x, pack_int8(whole), out_features, workers=1)
        expected = rounded(x, in_features) @ data.double().T
    elif form.startswith("int4"):
        nibbles, wide = int4_weight(out_features, in_features, 128), form == "int4_wide"
        found, _ = run(tiles, "int4", x, pack_int4(nibbles), out_features, group=128, wide=wide, workers=1)
        dense = nibbles._replace(scale=nibbles.scale.double()).dense()
        expected = (x.double() if wide else rounded(x, 128)) @ dense.T
    else:
        bytes_ = fp8_weight(out_features, in_features, 128 if form == "fp8_blocks" else in_features)
        found, _ = run(tiles, "fp8", x, pack_fp8(bytes_), out_features, group=bytes_.group, workers=1)
        expected = x.double() @ bytes_._replace(scale=bytes_.scale.double()).dense().T
    near(found, expected, 3e-6)


@pytest.mark.parametrize("dtype", TYPES)
def test_output_types(tiles: ctypes.CDLL, dtype: torch.dtype) -> None:
    x, weight = random(33, 64).bfloat16(), random(45, 64, seed=2).bfloat16()
    found, _ = run(tiles, "bf16", x, raw(interleaved(weight, 2, 32)), 45, dtype=dtype)
    near(found, x.double() @ weight.double().T, {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype])


@pytest.mark.parametrize("rows", [24, 600])
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_results_are_the_same_for_any_number_of_threads(tiles: ctypes.CDLL, rows: int, form: str) -> None:
    x = random(rows, 1100).bfloat16()
    weight = random(500, 1100, seed=2)
    whole = Int8((weight * 40).clamp(-127, 127).to(torch.int8), torch.rand(500))
    packed = {
        "bf16": lambda: raw(interleaved(weight.bfloat16(), 2, 32)),
        "int8": lambda: pack_int8(whole),
        "int4": lambda: pack_int4(int4_weight(500, 1100, 128)),
    }[form]()
    answers = [run(tiles, form, x, packed, 500, group=128, workers=workers)[0] for workers in (1, 2, 7, 40)]
    assert all(torch.equal(answers[0], other) for other in answers[1:])
    assert not answers[0].isnan().any()


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_row_affects_only_itself(tiles: ctypes.CDLL, form: str, bad: float) -> None:
    x = random(40, 128).bfloat16()
    x[7, 100] = bad
    weight = random(64, 128, seed=2)
    packed = {
        "bf16": lambda: raw(interleaved(weight.bfloat16(), 2, 32)),
        "int8": lambda: pack_int8(Int8(torch.ones(64, 128, dtype=torch.int8), torch.ones(64))),
        "int4": lambda: pack_int4(int4_weight(64, 128, 64)),
    }[form]()
    found, _ = run(tiles, form, x, packed, 64, group=64)
    assert not found[7].isfinite().any()
    assert torch.cat([found[:7], found[8:]]).isfinite().all()


def test_products_that_tiles_cannot_compute_use_vector_code(tiles: ctypes.CDLL) -> None:
    packed = raw(interleaved(random(64, 64).bfloat16(), 2, 32))
    assert run(tiles, "bf16", random(40, 64), packed, 64)[1] == 3  # float32 activations keep their precision
    assert run(tiles, "bf16", random(1, 64).bfloat16(), packed, 64)[1] == 3  # one row fills no tile
    assert run(tiles, "bf16", random(40, 64).bfloat16(), packed, 64)[1] == 0
    nibbles = pack_int4(int4_weight(64, 64, 64))
    assert run(tiles, "int4", random(16, 64), nibbles, 64, group=64)[1] == 3
    assert run(tiles, "int4", random(16, 64).bfloat16(), nibbles, 64, group=64, wide=True)[1] == 0
