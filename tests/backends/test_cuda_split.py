"""Split graphs on an NVIDIA GPU: the conformance suite, and replays against uncaptured steps."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.backends import cuda
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.engine.files.model_files import read_model
from localllm.engine.options import Compiler
from localllm.engine.runner import DeviceInfo, Runner

from . import canary
from .conformance import BUDGET, Conformance
from .test_graphs_split import at_random, prompts

pytestmark = [
    pytest.mark.skipif(not isinstance(cuda.probe(), DeviceInfo), reason=f"no GPU to use: {cuda.probe()}"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),  # Inductor's advice for float32
]


def split(folder: Path, compiler: Compiler, **more: Any) -> GraphRunner:
    budget = replace(
        BUDGET, graphs="split", compiler=compiler, max_step_tokens=64, compiled_dir=folder / "made", **more
    )
    stored = folder / "canary"
    stored.mkdir(exist_ok=True)
    runner = cuda.open(read_model(canary.save(stored)), budget)
    assert isinstance(runner, GraphRunner)
    return runner


class TestCudaSplit(Conformance):
    backend = "cuda"
    same_bits = False

    @pytest.fixture(scope="class", params=["eager", "inductor"])
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runner:
        return split(tmp_path_factory.mktemp("split"), request.param)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_thousand_replays_equal_uncaptured_steps(tmp_path: Path, compiler: Compiler) -> None:
    """All bits are equal: a replay runs the kernels of an uncaptured step."""
    graphs, random = split(tmp_path, compiler, dtype="bfloat16"), np.random.default_rng(7)
    for _ in range(1000):
        batch = at_random(random, int(random.choice(graphs.spec.graph_tokens)), canary.VOCAB, len(graphs.spec.groups))
        replayed, ran = (one.run(batch).result().hidden for one in (graphs, graphs._inner))
        assert np.array_equal(replayed, ran)
    assert prompts(graphs).compiler.late == 0


def test_closed_models_free_their_memory(tmp_path: Path) -> None:
    import torch

    left = []
    for _ in range(4):
        split(tmp_path, "inductor").close()
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved())
    assert left[-1] <= left[0]
