"""Odd shapes on an NVIDIA GPU, by each lane of its kernels, captured and not; and on the CPU, what every device does
with a shape that its kernels do not cover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from localllm.backends import cuda
from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.graphs.tape import Tape
from localllm.backends.pytorch.runner import open_runner
from localllm.engine.modelfiles import read_model
from localllm.engine.quantization import Quant
from localllm.engine.runner import Budget, DeviceInfo, Graphs, Runner
from localllm.kernels.ops import Ops

from .batches import Row
from .shapes import SHAPES
from .teacher import forced, logprobs
from .tiny import TINIES, VOCAB, Tiny

BUDGET = Budget(cache_bytes=2**25, max_rows=4, max_step_tokens=64, page_size=8)
LANES = ("library", "triton", "references")
EVERY = [*SHAPES, *TINIES]

gpu = [
    pytest.mark.real,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not isinstance(cuda.probe(), DeviceInfo), reason=f"no GPU to use: {cuda.probe()}"),
]


def prompts_of(shape: Tiny) -> list[list[int]]:
    return torch.randint(3, VOCAB, (2, shape.length), generator=torch.Generator().manual_seed(3)).tolist()


def expected(shape: Tiny, folder: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Saves the model in `dtype`; what transformers gives for its prompts in float32, each [tokens, vocab]."""
    shape.save(folder, dtype)  # and rounds its own rotary frequencies with the weights: read it anew
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts_of(shape)]


def difference(runner: Runner, shape: Tiny, logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[answers, vocab] of log-probabilities: what the runner's are off by, and what they should be."""
    places, found = forced(runner, prompts_of(shape))
    right = torch.stack([logits[prompt][position] for prompt, position in places]).log_softmax(-1)
    return found - right, right


def lanes() -> dict[str, Ops]:
    from localllm.backends.cuda.ops import LANES as found
    from localllm.backends.cuda.ops import MISSING

    return dict(zip(LANES[1:] if MISSING else LANES, found, strict=True))


def opened(
    folder: Path, shape: Tiny, lane: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch, budget: Budget = BUDGET
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
        """Off by some of its roundings (2**-8), not by a wrong answer."""
        logits = expected(shape, tmp_path, torch.bfloat16)
        for graphs in ("breakable", "off"):
            off, right = difference(opened(tmp_path, shape, lane, graphs, monkeypatch), shape, logits)
            assert off.std() < 0.08 * right.std(), graphs

    @pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
    @pytest.mark.parametrize("lane", ["library", "triton"])
    def test_quantised(self, quant: Quant, lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """1 to 16 rows at a time, against references with the same weights."""
        shape = Tiny("wide", "llama", {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64})
        shape.save(tmp_path, torch.bfloat16)
        budget = replace(BUDGET, quant=quant, max_rows=16)
        tokens = torch.randint(3, VOCAB, (16, 9), generator=torch.Generator().manual_seed(5)).tolist()
        found = []
        for one in ("references", lane):
            runner = opened(tmp_path, shape, one, "breakable", monkeypatch, budget)
            pages = [range(1 + 2 * row, 3 + 2 * row) for row in range(16)]
            logprobs(runner, [Row(tokens[row][:4], 0, pages[row]) for row in range(16)])
            for at, counts in enumerate([(16,), (1, 15), (5, 11), (6, 10), (7, 9)], 4):
                first = 0
                for count in counts:
                    some = range(first, first + count)
                    found.append(logprobs(runner, [Row(tokens[row][at : at + 1], at, pages[row]) for row in some]))
                    first += count
        half = len(found) // 2
        for right, other in zip(found[:half], found[half:], strict=True):
            assert (other - right).std() < 0.08 * right.std()


@pytest.mark.real_otherdevice
@pytest.mark.parametrize("label", ["llama-d512-h2x1", "gemma3-d16-h8x4-w2-tie-ropes", "qwen2-d20-h4x4-w5-default"])
@pytest.mark.parametrize("graphs", ["breakable", "off"])
def test_references_alone(label: str, graphs: Graphs, tmp_path: Path) -> None:
    """A tape for a graph."""
    (shape,) = (one for one in SHAPES if one.label == label)
    device = replace(DEVICE, ops=Ops(), recorder=Tape)
    logits = expected(shape, tmp_path)
    runner = open_runner(read_model(tmp_path), replace(BUDGET, context=shape.context, graphs=graphs), device, 2**30)
    off, _ = difference(runner, shape, logits)
    assert off.abs().max() < 1e-4
