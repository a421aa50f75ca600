"""The shared expert on a second queue, beside the routed experts: the order of the work, and which steps do so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.device import NO_ROWS, Captured
from localllm.backends.pytorch.graphs.parallel import LAYERS, ParallelExperts, SharedExperts, Timer
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.opening import open_runner
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases.layer import inputs
from localllm.kernels.ops.mlp import Experts
from localllm.kernels.ops.moe import Routed
from localllm.kernels.ops.streams import IN_ORDER, Streams

from .batches import Row, make_batch
from .checked_streams import CheckedStreams, checked
from .tape import Tape
from .tiny import TINIES, VOCAB

MODEL = next(tiny for tiny in TINIES if tiny.label == "qwen2_moe")
OPTIONS = LoadOptions(cache_bytes=2**20, max_rows=4, max_step_tokens=16, threads=1, dtype="float32")


def arguments(*, adapted: bool = False, shared_gate: bool = True) -> dict[str, Any]:
    """The arguments of a layer with a shared expert."""
    made = dict(inputs([(1, 9), (5, 5), (3, 12)], experts=6, adapted=adapted)(torch.Generator(), torch.float32))
    layer = made["layer"]
    if not shared_gate:
        made["layer"] = replace(layer, mlp=layer.mlp._replace(shared_gate=None))
    return made


def mlp() -> Experts:
    experts: Experts = arguments()["layer"].mlp
    return experts


PLAIN = replace(DEVICE, recorder=Tape, ops=Ops())  # a tape cannot replay the CPU's kernels of experts

# The order of the work.


@pytest.mark.parametrize("shared_gate", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("after_router", [False, True])
def test_layer_with_a_second_queue_computes_the_same_bits(after_router: bool, adapted: bool, shared_gate: bool) -> None:
    def computed(streams: Streams) -> Tensor:
        made = arguments(adapted=adapted, shared_gate=shared_gate)
        step = made.pop("step")._replace(streams=streams)
        return torch.stack(Ops().layer.decoder(**made, step=step))

    assert torch.equal(checked(computed, after_router), computed(IN_ORDER))


@pytest.mark.parametrize("after_router", [False, True])
def test_layer_forks_before_or_after_its_router(after_router: bool) -> None:
    was_forked = []

    def computed(streams: CheckedStreams) -> Tensor:
        def route(*values: Any) -> Routed:
            was_forked.append(streams.is_forked)
            return Ops().moe.route(*values)

        made = arguments()
        ops = replace(Ops(), moe=replace(Ops().moe, route=route))
        step = made["step"]._replace(streams=streams)
        return ops.layer.decoder(**made | {"ops": ops, "step": step})[0]

    checked(computed, after_router)
    assert was_forked == [not after_router]


def test_layer_without_a_shared_expert_has_no_fork() -> None:
    made = arguments()
    plain = replace(made["layer"], mlp=made["layer"].mlp._replace(shared=None, shared_gate=None))
    with CheckedStreams() as streams:
        Ops().layer.decoder(**made | {"layer": plain, "step": made["step"]._replace(streams=streams)})
    assert not streams.forks


def freed_before_the_join(streams: CheckedStreams) -> Tensor:
    x = torch.ones(4)
    with streams.fork():
        double = x * 2
    del x
    result = torch.ones(4) * 3
    streams.join()
    return result + double


def read_before_the_join(streams: CheckedStreams) -> Tensor:
    x = torch.ones(4)
    with streams.fork():
        double = x * 2
    result = x + double
    streams.join()
    return result


def written_before_the_join(streams: CheckedStreams) -> Tensor:
    x = torch.ones(4)
    with streams.fork():
        double = x * 2
    x += 1
    streams.join()
    return double


def without_a_join(streams: CheckedStreams) -> Tensor:
    with streams.fork():
        return torch.ones(4)


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (freed_before_the_join, "freed before the join"),
        (read_before_the_join, "uses memory that the other queue writes"),
        (written_before_the_join, "writes memory that the other queue reads"),
        (without_a_join, "without a join"),
    ],
)
def test_checked_streams_find_conflicts(work: Callable[[CheckedStreams], Tensor], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        checked(work)


# The steps with a second queue.


class CheckedTape(Tape):
    """A recorder that fails if a capture ends between a fork and its join, or if work forks outside of a capture."""

    streams: Mapping[bool, CheckedStreams]  # by Streams.after_router

    def begin(self) -> None:
        self._allow_forks(True)
        super().begin()

    def end(self) -> Captured:
        is_forked = any(streams.is_forked for streams in self.streams.values())
        assert not is_forked, "a capture ends between a fork and its join"
        self._allow_forks(False)
        return super().end()

    def _allow_forks(self, is_allowed: bool) -> None:
        for streams in self.streams.values():
            streams.is_allowed = is_allowed


@contextmanager
def device_with_two_queues() -> Iterator[tuple[Any, Mapping[bool, CheckedStreams]]]:
    """A device that captures steps. The mapping has its streams for each value of Streams.after_router."""
    streams = {after_router: CheckedStreams(after_router) for after_router in (False, True)}
    recorder = type("Recorder", (CheckedTape,), {"streams": streams})
    device = replace(PLAIN, recorder=recorder, streams=lambda after_router=False: streams[after_router])
    with streams[False], streams[True]:
        for one in streams.values():
            one.is_allowed = False
        yield device, streams


def shared_experts(layers: int) -> SharedExperts:
    return SharedExperts([mlp()] * layers, 48, torch.float32)


@pytest.mark.parametrize("fastest", ["one queue", "before the router", "after the router", "not measured"])
def test_captured_steps_have_the_fastest_streams(fastest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MODEL.save(tmp_path)
    options = replace(OPTIONS, graphs="breakable", streams="one" if fastest == "not measured" else "measured")
    batches = [[Row([5, 9, 77, 3, 20, 101], 0, [1])], [Row([7], 6, [1]), Row([8], 0, [2])]]
    plain = open_runner(read_model(tmp_path), OPTIONS, PLAIN, 2**30)
    expected = [plain.run(make_batch(rows, VOCAB)).result().tokens.tolist() for rows in batches]
    with device_with_two_queues() as (device, streams):
        by_name = {"one queue": IN_ORDER, "after the router": streams[True]}
        chosen = by_name.get(fastest, streams[False])
        monkeypatch.setattr(ParallelExperts, "_fastest", lambda *_: chosen)
        runner = open_runner(read_model(tmp_path), options, device, 2**30)
        assert isinstance(runner, GraphRunner)
        captures = len(runner.spec.graph_rows) + len(runner.spec.graph_tokens)
        layers = read_model(tmp_path).config.num_layers
        for one in streams.values():
            is_used = one is chosen and options.streams == "measured"
            assert one.forks == (captures * layers if is_used else 0)
        is_forked = chosen is not IN_ORDER and options.streams == "measured"
        sizes = {*runner.spec.graph_rows, *runner.spec.graph_tokens}
        assert runner.second_queue_tokens == (tuple(sorted(sizes)) if is_forked else ())
        actual = [runner.run(make_batch(rows, VOCAB)).result().tokens.tolist() for rows in batches]
    assert actual == expected


def timer(*times: float) -> Timer:
    """A timer that returns these milliseconds for one queue, a fork before the router and a fork after it."""
    values = iter(list(times) * 1000)

    def milliseconds(module: ModuleType, replay: Captured) -> float:
        replay(NO_ROWS)
        return next(values)

    return milliseconds


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((1.0, 0.9, 0.95), False),
        ((1.0, 0.95, 0.9), True),
        ((1.0, 1.1, 1.0), None),
        ((1.0, 0.97, 0.99), False),
        ((1.0, 0.99, 0.985), None),  # less than MIN_GAIN
        ((0.1, 0.09, 0.09), None),  # less than MIN_LAYER_GAIN in each layer
    ],
)
def test_second_queue_must_gain_time(times: tuple[float, ...], chosen: bool | None) -> None:
    with device_with_two_queues() as (device, streams):
        choice = ParallelExperts(device, shared_experts(LAYERS + 1), timer(*times))
        for _ in range(2):
            assert choice.streams(3) is (IN_ORDER if chosen is None else streams[chosen])
    for one in streams.values():
        assert one.forks == LAYERS, "a size is measured once"


def test_sizes_are_measured_separately() -> None:
    with device_with_two_queues() as (device, streams):
        times = [1.0, 0.5, 1.0] * 6 + [1.0, 1.5, 1.0] * 6
        choice = ParallelExperts(device, shared_experts(1), lambda *_: times.pop(0))
        assert choice.streams(2) is streams[False]
        assert choice.streams(4) is IN_ORDER
        assert choice.streams(2) is streams[False]


def test_measurement_without_memory_chooses_one_queue() -> None:
    def milliseconds(module: ModuleType, replay: Callable[[], None]) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with device_with_two_queues() as (device, _):
        assert ParallelExperts(device, shared_experts(1), milliseconds).streams(2) is IN_ORDER


def test_devices_with_one_queue_measure_nothing() -> None:
    choice = ParallelExperts(PLAIN, shared_experts(1), lambda *_: pytest.fail("measured"))
    assert choice.streams(2) is IN_ORDER


def test_models_without_a_shared_expert_create_no_second_queue(tmp_path: Path) -> None:
    def streams() -> Streams:
        pytest.fail("a second queue was created")

    next(tiny for tiny in TINIES if tiny.label == "qwen3_moe").save(tmp_path)
    device = replace(DEVICE, recorder=Tape, streams=cast(Any, streams))
    options = replace(OPTIONS, streams="measured")
    assert isinstance(open_runner(read_model(tmp_path), options, device, 2**30), GraphRunner)
