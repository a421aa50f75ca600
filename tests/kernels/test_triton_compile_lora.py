"""The Triton kernels of LoRA products, compiled for every target, for ranks from 1 to 256."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_compile import POINTERS, TARGETS, Build, Target, compile_for, spilled

from localllm.kernels.triton import lora

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

INTEGERS = dict.fromkeys(("order", "starts", "slots", "ids"), "*i32")
EVEN = frozenset(("in_features", "x_stride", "a_stride", "share", "out_stride", "b_stride"))
CHUNKS = (16, 32, 64)  # tokens of a tile
TYPES = (torch.bfloat16, torch.float32)
# Known: 8 bytes of a thread.
SPILLING = {
    *(("sm_80", label) for label in ("float32-32-64-16", "float32-32-256-16")),
    *(("sm_100", label) for label in ("float32-16-64-1", "float32-16-256-1")),
}


def products(target: Target) -> Iterator[Build]:
    for dtype, chunk in itertools.product(TYPES, CHUNKS):
        for rank, slices in ((1, 1), (32, 3), (64, 3), (256, 3)):
            yield shrink(target, dtype, chunk, rank, slices)
        for rank, shares in itertools.product((1, 64, 256), (1, 16)):
            yield expand(target, dtype, chunk, rank, shares)
        for rank in (1, 256):
            constants = {"WIDTH": rank, "PADDED": lora.padded(rank), "CHUNK": chunk}
            yield build(f"{name_of(dtype)}-{chunk}-{rank}", lora.lookup, dtype, **constants)


def shrink(target: Target, dtype: torch.dtype, chunk: int, rank: int, slices: int) -> Build:
    width = rank * slices
    blocks = lora.blocks_of(chunk, width, dtype, target.device)
    constants = {"WIDTH": width, "COLUMNS": blocks.columns, "CHUNK": chunk, "BLOCK_K": blocks.inputs}
    return build(f"{name_of(dtype)}-{chunk}-{rank}x{slices}", lora.shrink, dtype, blocks.stages, **constants)


def expand(target: Target, dtype: torch.dtype, chunk: int, rank: int, shares: int) -> Build:
    constants = lora.expansion(chunk, rank, dtype, target.device)
    del constants["num_warps"]
    constants |= {"RANK": rank, "WIDTH": 3 * rank, "SHARES": shares, "CHUNK": chunk}
    return build(f"{name_of(dtype)}-{chunk}-{rank}-{shares}", lora.expand, dtype, **constants)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def build(name: str, kernel: Any, dtype: torch.dtype, stages: int = 3, **constants: Any) -> Build:
    types = {
        **INTEGERS,
        **dict.fromkeys(("inner", "scales"), "*fp32"),
        **dict.fromkeys(("out", "x", "a", "b"), POINTERS[dtype]),
    }
    arguments = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    return Build(name, kernel, arguments, constants, lora.warps_of(constants["CHUNK"]), stages, EVEN)


RUNS = [(target, one) for target in TARGETS for one in products(target)]


def runs() -> Iterator[Any]:
    for target, one in RUNS:
        quick = str(target) == "sm_90" and one.constants["CHUNK"] == 64
        marks = [] if quick else [pytest.mark.slow]
        yield pytest.param(target, one, id=f"{target}-{one.kernel.__name__}-{one.label}", marks=marks)


@pytest.mark.parametrize(("target", "build"), list(runs()))
def test_compiles(target: Target, build: Build, tmp_path: Path) -> None:
    compiled = compile_for(target, build)
    assert compiled.metadata.shared <= target.shared
    if (str(target), build.label) not in SPILLING:
        assert spilled(target, compiled, tmp_path) == 0


def test_blocks_fit_every_target() -> None:
    """Every rank, number of slices and dtype, with tiles of up to 128 tokens."""
    for target, dtype, chunk in itertools.product(TARGETS, TYPES, (*CHUNKS, 128)):
        for width in range(1, 3 * 256 + 1):
            blocks = lora.blocks_of(chunk, width, dtype, target.device)
            assert blocks.shared(chunk, dtype) <= target.shared
