"""On an NVIDIA GPU: the self-test of the kernels, and FlashInfer's attention against the built-in attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.app import paths
from localllm.backends import cuda
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import DeviceInfo

from . import canary
from .batches import Row, make_batch
from .conformance import BUDGET, Conversation

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not isinstance(cuda.probe(), DeviceInfo), reason=f"no GPU to use: {cuda.probe()}"),
]

OFF = LoadOptions(cache_bytes=2**26, max_rows=8, graphs="off")


def logits_of(runner: Any, rows: Sequence[Row]) -> torch.Tensor:
    """Logits of all tokens of the step [tokens, vocab]."""
    assert isinstance(runner, TorchRunner)
    with torch.inference_mode():
        batch = make_batch(rows, runner.spec.vocab_size, groups=len(runner.spec.groups))
        step = runner.inputs.send(batch).step
        every = replace(step, last=torch.arange(batch.num_tokens, dtype=torch.int32, device=runner.device.name))
        ops = runner.device.ops
        return runner.model.logits(runner.model(every, ops, runner.kv), ops).float()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_self_test_accepts_all_kernels(tmp_path: Path, dtype: Any) -> None:
    """Later starts use the cached results."""
    files, budget = read_model(paths.guide_dir()), replace(OFF, dtype=dtype, self_test_dir=tmp_path / "kept")
    results = []
    for _ in range(2):
        runner = cuda.open(files, budget)
        assert runner.spec.warnings == ()
        runner.close()
        (file,) = (tmp_path / "kept").iterdir()
        results.append((file.stat().st_ino, file.stat().st_mtime_ns))
    assert results[0] == results[1], "the second start writes no results"


def with_attention(name: str) -> LoadOptions:
    """Options with a third-party attention, or with the attention of a set of kernels."""
    from localllm.backends.cuda.ops import KERNELS

    if name == "flashinfer":
        pytest.importorskip("flashinfer")
        return replace(OFF, attention=name)
    if name not in {one.name for one in KERNELS}:
        pytest.skip(f"this machine has no kernels {name}")
    return replace(OFF, ops=(f"attention.paged={name}",))


@pytest.mark.parametrize("name", ["flashinfer", "cpp", "triton", "reference"])
def test_attentions_have_equal_logits(name: str) -> None:
    """Full prompts, chunks and single tokens, in one step and in several steps."""
    files = read_model(paths.guide_dir())
    built_in, chosen = cuda.open(files, OFF), cuda.open(files, with_attention(name))
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, files.config.vocab_size, (3, 150), generator=generator).tolist()
    pages = [range(1 + row * 16, 17 + row * 16) for row in range(3)]
    steps = [
        [Row(prompts[0][:100], 0, pages[0]), Row(prompts[1][:33], 0, pages[1])],
        [
            Row(prompts[0][100:101], 100, pages[0]),
            Row(prompts[1][33:120], 33, pages[1]),
            Row(prompts[2][:5], 0, pages[2]),
        ],
        [Row(prompts[0][101:102], 101, pages[0]), Row(prompts[1][120:121], 120, pages[1])],
        [Row(prompts[0][102:103], 102, pages[0])],
    ]
    for rows in steps:
        one, other = logits_of(built_in, rows), logits_of(chosen, rows)
        assert (one - other).abs().max() <= 2e-2 * one.abs().max()
        assert one.isfinite().all()


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_flashinfer_through_the_engine(tmp_path: Path, graphs: Any) -> None:
    pytest.importorskip("flashinfer")
    files = read_model(canary.save(tmp_path, torch.bfloat16))
    talk = Conversation(cuda.open(files, replace(BUDGET, attention="flashinfer", graphs=graphs)))
    prompts = {f"r{key}": canary.prompt(key % canary.KEYS, 22 + 9 * key, seed=key) for key in range(7)}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 30)
        talk.step()
    assert talk.finish() == {name: canary.walk(prompt, 30) for name, prompt in prompts.items()}
