"""The CUDA backend on an NVIDIA GPU: the conformance suite with and without graphs, and tests that need a GPU."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localllm.backends import cuda
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.runner import DeviceInfo, Runner

from . import canary
from .conformance import BUDGET, Conformance, Conversation, Planned, check_crowd, crowd
from .test_load_memory import save_experts
from .tiny import Tiny

pytestmark = pytest.mark.skipif(not isinstance(cuda.probe(), DeviceInfo), reason=f"no GPU to use: {cuda.probe()}")


class TestCuda(Conformance):
    backend = "cuda"
    same_bits = False


class TestCudaUncaptured(Conformance):
    backend = "cuda"
    same_bits = False

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        files = read_model(canary.save(tmp_path_factory.mktemp("canary")))
        return cuda.open(files, replace(BUDGET, graphs="off"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return cuda.open(read_model(canary.save(tmp_path_factory.mktemp("canary"))), replace(BUDGET, max_rows=64))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # a prototype, torch says
def test_decode_with_overlap_does_not_synchronize(runner: Runner) -> None:
    """In decode steps with overlap, the host waits only for the drawn tokens of the previous step."""
    import torch

    talk = Conversation(runner)
    for key in range(5):
        talk.submit(f"r{key}", canary.prompt(key, 30, seed=key), 60)
    for _ in range(4):
        talk.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            talk.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert talk.finish()["r1"] == canary.walk(canary.prompt(1, 30, seed=1), 60)


def test_a_thousand_replays_give_the_known_tokens(runner: Runner) -> None:
    rng = np.random.default_rng(1)
    talk = Conversation(runner)
    prompts: dict[str, list[int]] = {}
    steps = 0
    while steps < 1000:
        if len(prompts) < 400 and rng.random() < 0.3:
            name = f"r{len(prompts)}"
            prompts[name] = canary.prompt(int(rng.integers(canary.KEYS)), int(rng.integers(21, 60)), seed=len(prompts))
            talk.submit(name, prompts[name], int(rng.integers(1, 90)))
        talk.step()
        steps += 1
    talk.finish()
    for name, prompt in prompts.items():
        assert talk.tokens[name] == canary.walk(prompt, len(talk.tokens[name])), name


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [16, 64, 256])
def test_a_crowd_gives_known_tokens(tmp_path, rows: int, overlap: bool) -> None:
    """Requests join and leave, are preempted, and reuse prefixes."""
    runner = cuda.open(read_model(canary.save(tmp_path)), crowd(rows))
    check_crowd(Planned(runner, overlap=overlap), rows)


def test_closed_models_free_their_memory(tmp_path) -> None:
    import torch

    files = read_model(canary.save(tmp_path))
    left = []
    for _ in range(4):
        opened = cuda.open(files, BUDGET)
        engine = Engine(opened)
        engine.close()
        del opened, engine
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved())
    assert left[-1] <= left[0]


def memory_beyond_model(folder: Path, quant: Quant) -> int:
    """The largest number of bytes during a load beyond the weights and the KV cache of the loaded model."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner = cuda.open(read_model(folder), replace(BUDGET, quant=quant, context=128, graphs="off", adapter_slots=0))
    loaded = runner.spec.weight_bytes + runner.spec.cache_bytes
    peak = torch.cuda.max_memory_allocated()
    runner.close()
    return peak - before - loaded


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "fp8"])
def test_load_never_holds_two_copies_of_a_weight(quant: Quant, tmp_path) -> None:
    """The head and the embedding have 100 MiB each in the file."""
    import torch

    Tiny("llama", "llama", {"vocab_size": 400_000, "hidden_size": 128}).save(tmp_path, torch.bfloat16)
    assert memory_beyond_model(tmp_path, quant) < 32 * 2**20


@pytest.mark.parametrize("label", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("quant", ["none", "int8", "int4", "fp8"])
def test_load_never_holds_two_copies_of_stacked_experts(quant: Quant, label: str, tmp_path) -> None:
    """The tensors of all experts have 226 MB as stored."""
    save_experts(tmp_path, label)
    assert memory_beyond_model(tmp_path, quant) < 64 * 2**20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
def test_weights_quantised_on_the_gpu_equal_those_of_the_cpu(quant: Quant, dtype: str) -> None:
    """Bit by bit, for ordinary rows, rows of zeros and rows near the limits of the dtype."""
    import torch

    from localllm.backends.pytorch.quant.choose import ON_LOAD
    from localllm.kernels.ops.linear import weight_tensors

    quantise = ON_LOAD[quant]
    assert quantise is not None
    weight = torch.randn(1024, 4100, generator=torch.Generator().manual_seed(5)) / 64
    weight[::7] *= torch.logspace(-38, 4, len(weight[::7]))[:, None]
    weight[5] = 0.0
    weight[6, :70] = 0.0
    weight = weight.to(getattr(torch, dtype))
    expected = weight_tensors(quantise(weight))
    for actual, one in zip(weight_tensors(quantise(weight.to("cuda"))), expected, strict=True):
        assert torch.equal(actual.cpu().view(torch.uint8), one.view(torch.uint8))
