"""The shared expert on a second stream, in order and in captured graphs, over the fake ACL.

Side streams run as late or as early as their waits allow, and new memory is poisoned until it is written: a missing
wait gives a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from localllm.backends.npu.device import device
from localllm.backends.npu.installation import start
from localllm.backends.npu.recorder import NpuRecorder
from localllm.backends.pytorch.device import NO_ROWS, Captured
from localllm.backends.pytorch.graphs.parallel import ParallelExperts
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.streams import SideStream
from localllm.engine.files.model_files import read_model
from localllm.engine.options import Graphs, LoadOptions
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases.moe import random_experts
from localllm.kernels.ops.cases.reference_check import copy_to
from localllm.kernels.ops.mlp import Experts, GatedMlp
from localllm.kernels.ops.moe import Routing
from localllm.kernels.ops.projection import Product
from localllm.kernels.ops.step import Cache, LayerStep
from localllm.kernels.ops.streams import IN_ORDER, Streams

from ..backends.batches import Row, make_batch
from ..backends.tiny import TINIES, VOCAB

pytestmark = pytest.mark.emulated

HIDDEN, INNER, TOKENS = 16, 24, 6
STEPS = 5
TINY = next(tiny for tiny in TINIES if tiny.label == "qwen2_moe")


class NoWaits:
    """The second stream without its waits."""

    after_router = False

    def __init__(self) -> None:
        self._side = torch_npu.npu.Stream()

    @contextmanager
    def fork(self) -> Iterator[None]:
        with torch_npu.npu.stream(self._side):
            yield

    def join(self) -> None:
        pass


def side(after_router: bool = False) -> SideStream:
    return SideStream(torch_npu.npu, after_router)


def mlp() -> Experts:
    """Routed experts with a shared expert, on the NPU."""
    generator = torch.Generator().manual_seed(3)

    def product(out_features: int, in_features: int) -> Product:
        return Product("dense", torch.randn(out_features, in_features, generator=generator) / in_features**0.5)

    experts = Experts(
        router=product(4, HIDDEN),
        routing=Routing(2, "softmax", True),
        correction=None,
        weights=random_experts("dense", 4, HIDDEN, INNER, generator, torch.float32),
        shared=GatedMlp(product(2 * INNER, HIDDEN), product(HIDDEN, INNER), "silu_and_mul"),
        shared_gate=product(1, HIDDEN),
    )
    on_device: Experts = copy_to(experts, "npu")
    return on_device


def step(streams: Streams) -> LayerStep:
    empty: Any = torch.empty(0, device="npu")
    return LayerStep(empty, empty, (), Cache((), ()), streams=streams)


def computed(experts: Experts, x: Tensor, streams: Streams) -> Tensor:
    """Several layers in a row, so that each reuses the memory of the one before it."""
    for _ in range(STEPS):
        x = experts(x, Ops(), step(streams))
    return x


def captured(work: Callable[[], Tensor]) -> tuple[Tensor, Captured]:
    recorder = NpuRecorder()
    with recorder.session():
        work()
        recorder.begin()
        output = work()
        return output, recorder.end()


def inputs(number: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(number))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("after_router", [False, True])
def test_second_stream_computes_the_same_bits(after_router: bool) -> None:
    experts = mlp()
    x = inputs(1).to("npu")
    expected = computed(experts, x, IN_ORDER).cpu()
    assert torch.equal(computed(experts, x, side(after_router)).cpu(), expected)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("after_router", [False, True])
def test_captured_second_stream_computes_the_same_bits_for_new_inputs(after_router: bool) -> None:
    experts = mlp()
    x = inputs(0).to("npu")
    streams = side(after_router)
    output, replay = captured(lambda: computed(experts, x, streams))
    for number in (1, 2, 3):
        x.copy_(inputs(number).to("npu"))
        replay(NO_ROWS)
        assert torch.equal(output.cpu(), computed(experts, inputs(number).to("npu"), IN_ORDER).cpu())


def test_missing_waits_are_seen() -> None:
    """The order of streams that the other tests use can fail."""
    experts = mlp()
    x = inputs(1).to("npu")
    expected = computed(experts, x, IN_ORDER).cpu()
    assert not torch.equal(computed(experts, x, NoWaits()).cpu(), expected)


@pytest.mark.usefixtures("order")
def test_result_of_the_second_stream_may_be_freed_after_the_join() -> None:
    """Its memory belongs to the second stream, whose next work waits for the work of the main stream that read it. So
    neither a clone of the input nor record_stream is necessary."""
    streams = side()
    total = torch.zeros(64, device="npu")
    x = torch.ones(64, device="npu")
    for number in range(1, 9):
        with streams.fork():
            part = x * float(number)
        streams.join()
        total = total + part
        del part
    assert (total.cpu() == 36.0).all()


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    ("graphs", "times"),
    [("full", (1.0, 0.5, 0.9)), ("breakable", (1.0, 0.9, 0.5))],
    ids=["before the router", "after the router"],
)
def test_captured_steps_of_a_model_have_the_measured_streams(
    graphs: Graphs, times: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decoding of several rows, whose experts change with each step. Steps without a graph never fork."""
    start()
    TINY.save(tmp_path)
    files = read_model(tmp_path)
    options = LoadOptions(cache_bytes=2**21, max_rows=4, max_step_tokens=16, threads=1, graphs=graphs)
    measured = cycle(times)

    def milliseconds(module: ModuleType, replay: Captured) -> float:
        replay(NO_ROWS)
        return next(measured)

    monkeypatch.setattr(ParallelExperts.__init__, "__defaults__", (milliseconds,))
    tokens = []
    for streams in ("one", "measured"):
        runner = open_runner(files, replace(options, streams=streams), device(options), 2**30)
        assert isinstance(runner, GraphRunner)
        sizes = {*runner.spec.graph_rows, *runner.spec.graph_tokens}
        assert set(runner.second_queue_tokens) == (sizes if streams == "measured" else set())
        tokens.append(decoded(runner))
    assert tokens[0] == tokens[1]


def decoded(runner: GraphRunner) -> list[list[int]]:
    """The tokens of a prompt, and of steps with one to four rows."""
    rows = [Row([5, 9, 77, 3, 20, 101][: 3 + row], 0, [1 + row]) for row in range(4)]
    results = [runner.run(make_batch([row], VOCAB)).result().tokens.tolist() for row in rows]
    for position in range(8):
        rows = [Row([7 + position + row], 3 + row + position, [1 + row]) for row in range(1 + position % 4)]
        results.append(runner.run(make_batch(rows, VOCAB)).result().tokens.tolist())
    return results
