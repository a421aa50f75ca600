"""Experts with AMX tiles against the reference in float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu import device as cpu
from localllm.kernels.ops.cases.moe import FORMATS, random_experts
from localllm.kernels.ops.linear import PANEL
from localllm.kernels.ops.moe import ExpertWeights, Routed, experts

pytestmark = pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TOLERANCES = {"dense": 1e-2, "int8": 3e-2, "int4": 3e-2, "int4_wide": 1e-2, "fp8": 1e-2, "mxfp4": 1e-2}
SIZES = [(3, 1, 64, 32), (5, 2, 160, 96), (8, 3, 1088, 576)]  # experts, top_k, hidden, inner


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def aligned(data: Tensor) -> Tensor:
    """A copy at an address that is a multiple of 64."""
    memory = torch.empty(len(data) + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + len(data)].copy_(data)


def run(tiles: ctypes.CDLL, x: Tensor, routed: Routed, weights: ExpertWeights, workers: int = 3) -> tuple[Tensor, int]:
    """(out, threads that called the AVX-512 experts). x lies in a wider tensor full of NaN."""
    tokens, hidden = x.shape
    room = torch.full((tokens, hidden + 3), torch.nan).to(x.dtype)
    room[:, :hidden] = x
    out = torch.full_like(x, torch.nan)
    packed = cpu.OPS.moe.pack(weights, x.dtype)
    stacks = [aligned(packed.gate_up.data), aligned(packed.down.data)]
    numbers = (tokens, routed.experts.shape[1], weights.experts, hidden, weights.inner, room.stride(0))
    delegations = tiles.run_experts(
        pointer(out),
        pointer(room),
        TYPES[x.dtype],
        pointer(routed.experts),
        pointer(routed.weights),
        *map(pointer, (*stacks, weights.gate_up_bias, weights.down_bias)),
        packed.gate_up.format,
        ctypes.c_bool(weights.op == "int4_wide"),
        0,
        *map(ctypes.c_int64, (*numbers, packed.gate_up.group, packed.down.group)),
        workers,
    )
    return out, delegations


def inputs(
    op: str, tokens: int, size: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16, bias: bool = False
) -> tuple[Tensor, Routed, ExpertWeights]:
    """Half of the tokens choose expert 0, so that experts have different numbers of rows."""
    count, top_k, hidden, inner = size
    generator = torch.Generator().manual_seed(tokens)
    weights = random_experts(op, count, hidden, inner, generator, dtype, bias=bias)
    scores = torch.rand(tokens, count, generator=generator)
    scores[::2, 0] = 2.0
    chosen = scores.argsort(1, descending=True)[:, :top_k].int().contiguous()
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    return x, Routed(chosen, torch.rand(tokens, top_k, generator=generator)), weights


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [33, 300])
@pytest.mark.parametrize("op", FORMATS)
def test_experts(tiles: ctypes.CDLL, op: str, tokens: int, size: tuple[int, int, int, int]) -> None:
    x, routed, weights = inputs(op, tokens, size, bias=True)
    result, delegations = run(tiles, x, routed, weights)
    assert delegations == 0
    expected = experts(x.double(), routed, weights)
    atol = TOLERANCES[op] * expected.abs().max().item()
    torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize("op", FORMATS)
def test_results_are_the_same_for_any_number_of_threads(tiles: ctypes.CDLL, op: str) -> None:
    arguments = inputs(op, 100, SIZES[1])
    results = [run(tiles, *arguments, workers=workers)[0] for workers in (1, 2, 7)]
    assert not results[0].isnan().any()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("op", FORMATS)
def test_a_nan_token_affects_only_itself(tiles: ctypes.CDLL, op: str) -> None:
    x, routed, weights = inputs(op, 40, SIZES[1])
    x[7, 11] = torch.nan
    result, _ = run(tiles, x, routed, weights)
    assert result[7].isnan().all()
    assert torch.cat([result[:7], result[8:]]).isfinite().all()


@pytest.mark.parametrize(("op", "tokens", "dtype"), [("int8", 2, torch.bfloat16), ("dense", 64, torch.float32)])
def test_few_rows_and_float32_use_vector_code(tiles: ctypes.CDLL, op: str, tokens: int, dtype: torch.dtype) -> None:
    assert SIZES[0][2] % PANEL == 0
    assert run(tiles, *inputs(op, tokens, SIZES[0], dtype))[1] == 3
