"""What the Triton products are made of, compiled for every target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_compile import TARGETS, Build, Target, compile_for, spilled

from localllm.kernels.triton import linear, round_rows, widen

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

NUMBERS = dict.fromkeys(("rows", "outs", "ins", "subs", "sub", "x_stride", "pitch"), "i32")
POINTERS = {"out": "*bf16", "x": "*bf16", "data": "*u8", "bias": "*fp32"}
RECORDS = {  # of turned int4, of int4 as loaded, of fp8
    "turned": ({"scale": "*i32", "zero": "*i32"}, True, True),
    "int4": ({"scale": "*fp16", "zero": "*u8"}, True, False),
    "fp8": ({"scale": "*fp32", "zero": "*fp32"}, False, False),
}


def build(label: str, amd: bool) -> Build:
    """As rows_of_block and depth_of_block choose."""
    types, nibbles, turned = RECORDS[label]
    constants: dict[str, Any] = {"NIBBLES": nibbles, "TURNED": turned, "HAS_BIAS": True, "BLOCK_M": 32 if amd else 16}
    constants |= {"BLOCK_N": 64, "BLOCK_K": 32 if amd or not nibbles else 64}
    arguments = {**NUMBERS, **POINTERS, **types}
    return Build(label, linear._product, arguments, constants, linear.WARPS, linear.STAGES)


def widening(label: str) -> Build:
    types, nibbles, turned = RECORDS[label]
    constants = {"NIBBLES": nibbles, "TURNED": turned, "BLOCK_N": widen.BLOCK, "BLOCK_K": 64}
    return Build(f"widen-{label}", widen._widen, {**NUMBERS, **POINTERS, **types, "start": "i32"}, constants, 4, 3)


def rounding() -> Iterator[Build]:
    numbers = dict.fromkeys(("rows", "ins", "outs", "x_stride"), "i32")
    floats = dict.fromkeys(("scales", "row_scale", "scale", "bias"), "*fp32")
    shared = {**numbers, **floats, "x": "*bf16"}
    of_rows, of_groups, back = (getattr(round_rows, name) for name in ("_round_rows", "_round_groups", "_scale_back"))
    yield Build("round-rows", of_rows, {**shared, "out": "*i8"}, {"BLOCK": 2048}, 8, 3)
    for group in (32, 128):
        yield Build(
            f"round-{group}", of_groups, {**shared, "out": "*bf16"}, {"GROUP": group, "ROWS": 2048 // group}, 4, 3
        )
    sums = {**shared, "sums": "*i32", "out": "*bf16"}
    yield Build("scale-back", back, sums, {"HAS_BIAS": True, "BLOCK": 2048}, 8, 3)


RUNS = [
    (target, one)
    for target in TARGETS
    for one in (
        *(build(label, target.backend == "hip") for label in RECORDS),
        *map(widening, RECORDS),
        *rounding(),
    )
]


@pytest.mark.parametrize(("target", "build"), RUNS, ids=[f"{target}-{one.label}" for target, one in RUNS])
def test_compiles(target: Target, build: Build, tmp_path: Path) -> None:
    compiled = compile_for(target, build)
    assert compiled.metadata.shared <= target.shared
    assert spilled(target, compiled, tmp_path) == 0
