"""The Triton products compiled for every target, in the blocks of few rows and of many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_compile import TARGETS, Build, Target, compile_for, spilled

from localllm.kernels.triton import linear

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

NUMBERS = dict.fromkeys(("rows", "outs", "ins", "subs", "sub", "x_stride", "pitch"), "i32")
POINTERS = {"out": "*bf16", "x": "*bf16", "data": "*u8", "bias": "*fp32"}
RECORDS = {  # of turned int4, of int4 as loaded, of fp8
    "turned": ({"scale": "*i32", "zero": "*i32"}, True, True),
    "int4": ({"scale": "*fp16", "zero": "*u8"}, True, False),
    "fp8": ({"scale": "*fp32", "zero": "*fp32"}, False, False),
}


def build(label: str, rows: int, depth: int) -> Build:
    types, nibbles, turned = RECORDS[label]
    block_m = linear.rows_of_block(rows)
    constants: dict[str, Any] = {"NIBBLES": nibbles, "TURNED": turned, "HAS_BIAS": True}
    constants |= {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": depth}
    arguments = {**NUMBERS, **POINTERS, **types}
    return Build(f"{label}-{rows}", linear._product, arguments, constants, linear.WARPS, linear.STAGES)


RUNS = [
    (target, build(label, rows, 32 if label == "fp8" or target.backend == "hip" else 64))
    for target in TARGETS
    for label in RECORDS
    for rows in ((17, 512) if target.backend == "hip" else (16, 17, 512))
]


@pytest.mark.parametrize(("target", "build"), RUNS, ids=[f"{target}-{one.label}" for target, one in RUNS])
def test_compiles(target: Target, build: Build, tmp_path: Path) -> None:
    compiled = compile_for(target, build)
    assert compiled.metadata.shared <= target.shared
    assert spilled(target, compiled, tmp_path) == 0
