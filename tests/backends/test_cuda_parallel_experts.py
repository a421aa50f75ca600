"""On an NVIDIA GPU: the shared expert on a second stream computes the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.backends import cuda
from localllm.backends.pytorch.device import NO_ROWS
from localllm.backends.pytorch.graphs.cuda import CudaRecorder
from localllm.backends.pytorch.graphs.parallel import ParallelExperts
from localllm.engine.files.model_files import read_model
from localllm.engine.options import Graphs
from localllm.engine.runner import DeviceInfo
from localllm.kernels.ops.cases.layer import inputs
from localllm.kernels.ops.cases.reference_check import copy_to
from localllm.kernels.ops.streams import IN_ORDER, Streams

from .batches import Row, make_batch
from .test_parallel_experts import MODEL, OPTIONS
from .tiny import VOCAB

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not isinstance(cuda.probe(), DeviceInfo), reason=f"no GPU to use: {cuda.probe()}"),
]
STEPS = 10  # of a graph


@pytest.mark.parametrize("replays", [100, pytest.param(10_000, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_two_queues_compute_the_same_bits_in_graphs(replays: int) -> None:
    """The input of a step is the result of the step before, so a wrong bit is in all later results."""
    from localllm.backends.cuda.device import DEVICE as CUDA  # needs Triton

    made = inputs([(16, 16)], hidden=512, inner=512, experts=16)(torch.Generator().manual_seed(1), torch.bfloat16)
    ops = CUDA.ops
    mlp = copy_to(made["layer"].mlp, "cuda")
    step = copy_to(made["step"], "cuda")
    noise = torch.randn(STEPS, *made["x"].shape, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)

    def run(state: Tensor, streams: Streams) -> None:
        for index in range(STEPS):
            x = mlp(state, ops, step._replace(streams=streams))
            state.copy_(ops.norm.rms(x + noise[index], weight, 1e-6))

    run(noise[0].clone(), IN_ORDER)
    recorder = CudaRecorder()
    states, graphs = [], []
    with recorder.session():
        for streams in (IN_ORDER, CUDA.streams(), CUDA.streams(after_router=True)):
            states.append(noise[0].clone())
            recorder.begin()
            run(states[-1], streams)
            graphs.append(recorder.end())
    for _ in range(0, replays, 100):
        for _ in range(100):
            for replay in graphs:
                replay(NO_ROWS)
        assert torch.equal(states[0], states[1])
        assert torch.equal(states[0], states[2])
        assert states[0].isfinite().all()


@pytest.mark.parametrize("graphs", ["full", "breakable"])
def test_model_with_two_queues_draws_the_same_tokens(
    graphs: Graphs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.backends.cuda.device import DEVICE as CUDA  # needs Triton

    MODEL.save(tmp_path, torch.bfloat16)
    batches = [[Row([5, 9, 77, 3, 20, 101], 0, [1])], [Row([7], 6, [1]), Row([8], 0, [2])]]
    tokens = []
    for streams in (IN_ORDER, CUDA.streams(), CUDA.streams(after_router=True)):
        monkeypatch.setattr(ParallelExperts, "_fastest", lambda *_, streams=streams: streams)
        options = replace(OPTIONS, dtype="bfloat16", graphs=graphs, streams="measured")
        runner = cuda.open(read_model(tmp_path), options)
        tokens.append([runner.run(make_batch(rows, VOCAB)).result().tokens.tolist() for rows in batches])
        runner.close()
    assert tokens[0] == tokens[1] == tokens[2]
