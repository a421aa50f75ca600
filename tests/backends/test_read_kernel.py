"""The kernel that measures read bandwidth: it compiles for every supported kind of GPU and reads every value."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from localllm.backends.pytorch.gpu import read_kernel
from localllm.backends.pytorch.gpu.read_kernel import SHAPES, Reader

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.compile
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 120, 32), ("hip", "gfx942", 64)])
def test_compiles(target: tuple[str, Any, int]) -> None:
    for block, loads, warps in SHAPES:
        signature = {"source": "*fp32", "sums": "*fp32", "BLOCK": "constexpr", "LOADS": "constexpr"}
        source = ASTSource(read_kernel._sum, signature, {"BLOCK": block, "LOADS": loads})
        compiled = triton.compile(source, GPUTarget(*target), {"num_warps": warps})
        assert compiled.metadata.shared < 2**16


@pytest.mark.real
@pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="no GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_is_read(shape: tuple[int, int, int]) -> None:
    buffer = torch.randn(2**18, device="cpu" if INTERPRETED else "cuda")
    reader = Reader(buffer, shape)
    reader.read()
    assert reader.total() == pytest.approx(float(buffer.sum(dtype=torch.float64)), abs=1e-2)
