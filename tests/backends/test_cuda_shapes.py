"""Odd shapes on an NVIDIA GPU, for all implementations of the ops, with and without graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localllm.backends import cuda
from localllm.engine.files.model_files import read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.runner import DeviceInfo, Runner
from localllm.kernels.ops import Ops

from .batches import Row
from .pages import PAGES
from .shapes import SHAPES
from .teacher import difference, expected, logprobs
from .tiny import TINIES, VOCAB, Tiny

BUDGET = LoadOptions(cache_bytes=2**25, max_rows=4, max_step_tokens=64, page_size=8)
LANES = ("library", "triton", "references")
EVERY = [*SHAPES, *TINIES, *PAGES]
SPLIT = (
    "llama-d512-h2x1",
    "gemma3-d16-h8x4-w2-tie-ropes",
    "qwen2-d20-h4x4-w5-default",
    "phi3-d12-h3x1-w9-default",
    "qwen2_moe",
)

gpu = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not isinstance(cuda.probe(), DeviceInfo), reason=f"no GPU to use: {cuda.probe()}"),
]


def lanes() -> dict[str, Ops]:
    from localllm.backends.cuda.ops import KERNELS

    names = {"cpp": "library", "reference": "references"}
    return {names.get(one.name, one.name): one.ops for one in KERNELS}


def opened(
    folder: Path, shape: Tiny, lane: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch, budget: LoadOptions = BUDGET
) -> Runner:
    from localllm.backends.cuda import device

    ops = lanes().get(lane) or pytest.skip("the library was not built")
    monkeypatch.setattr(device, "DEVICE", replace(device.DEVICE, ops=ops))
    return cuda.open(read_model(folder), replace(budget, context=shape.context, graphs=graphs))


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("shape", EVERY, ids=str)
    @pytest.mark.parametrize("lane", LANES)
    def test_float32(self, shape: Tiny, lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        logits = expected(shape, tmp_path)
        for graphs in ("breakable", "off"):
            off, _ = difference(opened(tmp_path, shape, lane, graphs, monkeypatch), shape, logits)
            assert off.abs().max() < 1e-3, graphs

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("lane", LANES)
    def test_bfloat16(self, shape: Tiny, lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error is a few roundings of bfloat16 (2**-8)."""
        logits = expected(shape, tmp_path, torch.bfloat16)
        for graphs in ("breakable", "off"):
            off, right = difference(opened(tmp_path, shape, lane, graphs, monkeypatch), shape, logits)
            assert off.std() < 0.08 * right.std(), graphs

    @pytest.mark.parametrize("shape", [shape for shape in EVERY if shape.label in SPLIT], ids=str)
    @pytest.mark.parametrize("lane", LANES)
    def test_split(self, shape: Tiny, lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prefill with a split forward pass."""
        logits = expected(shape, tmp_path)
        budget = replace(BUDGET, compiler="eager")
        off, _ = difference(opened(tmp_path, shape, lane, "split", monkeypatch, budget), shape, logits)
        assert off.abs().max() < 1e-3

    @pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
    @pytest.mark.parametrize("lane", ["library", "triton"])
    def test_quantised(self, quant: Quant, lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """1 to 16 rows at a time, against references with the same weights."""
        shape = Tiny("wide", "llama", {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64})
        shape.save(tmp_path, torch.bfloat16)
        budget = replace(BUDGET, quant=quant, max_rows=16)
        tokens = torch.randint(3, VOCAB, (16, 9), generator=torch.Generator().manual_seed(5)).tolist()
        result = []
        for one in ("references", lane):
            runner = opened(tmp_path, shape, one, "breakable", monkeypatch, budget)
            pages = [range(1 + 2 * row, 3 + 2 * row) for row in range(16)]
            logprobs(runner, [Row(tokens[row][:4], 0, pages[row]) for row in range(16)])
            for at, counts in enumerate([(16,), (1, 15), (5, 11), (6, 10), (7, 9)], 4):
                first = 0
                for count in counts:
                    some = range(first, first + count)
                    result.append(logprobs(runner, [Row(tokens[row][at : at + 1], at, pages[row]) for row in some]))
                    first += count
        half = len(result) // 2
        for right, other in zip(result[:half], result[half:], strict=True):
            assert (other - right).std() < 0.08 * right.std()
