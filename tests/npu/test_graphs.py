"""Graphs of torch_npu over the fake: replays, host numbers that change, and two streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu
from torch import Tensor

from localllm.backends.npu.recorder import NpuRecorder
from localllm.backends.pytorch.streams import SideStream

from .ops.attention import FusedInferAttentionScore, FusedInferAttentionScoreV2
from .ops.rules import Call
from .test_ops import arguments, example_call

pytestmark = pytest.mark.emulated
NPU = torch.device("npu", 0)
fused = pytest.mark.parametrize("op", [FusedInferAttentionScore(), FusedInferAttentionScoreV2()], ids=["v1", "v2"])
Fused = FusedInferAttentionScore | FusedInferAttentionScoreV2


def captured(
    work: Callable[[], Tensor], *, update: bool = False, mode: str = "global"
) -> tuple[torch_npu.npu.NPUGraph, Tensor]:
    graph = torch_npu.npu.NPUGraph()
    side = torch_npu.npu.Stream()
    torch_npu.npu.synchronize()
    with torch_npu.npu.graph(graph, stream=side, auto_dispatch_capture=update, capture_error_mode=mode):
        output = work()
    return graph, output


def test_a_replay_computes_again_and_poisons_its_outputs_first(order: str) -> None:
    x = torch.zeros(4, device=NPU)
    graph, output = captured(lambda: x * 2 + 1)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(output.cpu(), torch.full((4,), 2 * value + 1))


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_refuses_to_wait(mode: str) -> None:
    x = torch.zeros(4, device=NPU)
    with pytest.raises(RuntimeError, match="107027"):
        captured(lambda: x.cpu(), mode=mode)


def attention_of(op: Fused, values: dict[str, Any]) -> Tensor:
    output: Tensor = getattr(torch.ops.npu, op.names[0].removeprefix("npu::"))(**values)[0]
    return output


@fused
def test_replays_get_new_lengths(op: Fused, order: str) -> None:
    values = arguments(op, "npu")
    graph, output = captured(lambda: attention_of(op, values), update=True)
    for lens in ([200, 100, 2], [3, 128, 129], [256, 256, 256]):
        graph.update(cpu_update_input=[{op.kv_lens: lens}])
        graph.replay()
        call = example_call(op)
        for name in ("query", "key", "value"):
            setattr(call, name, values[name].cpu())
        setattr(call, op.kv_lens, lens)
        torch.testing.assert_close(output.cpu(), op.compute(call)[0], rtol=0, atol=0)


@fused
def test_replays_in_flight_keep_their_lengths(op: Fused, order: str) -> None:
    values = arguments(op, "npu")
    recorder = NpuRecorder()
    with recorder.session():
        recorder.begin()
        output = attention_of(op, values)
        replay = recorder.end()
    outputs = []
    for lens in ([200, 100, 2], [3, 128, 129], [256, 256]):  # the last row of the last step is padding
        replay(np.array(lens))
        outputs.append(output.clone())
    call = Call(**{**vars(example_call(op)), **{name: values[name].cpu() for name in ("query", "key", "value")}})
    for lens, actual in zip(([200, 100, 2], [3, 128, 129], [256, 256, 1]), outputs, strict=True):
        setattr(call, op.kv_lens, lens)
        torch.testing.assert_close(actual.cpu(), op.compute(call)[0], rtol=0, atol=0)


@fused
def test_a_replay_without_new_lengths_fails(op: Fused, order: str) -> None:
    values = arguments(op, "npu")
    graph, _ = captured(lambda: attention_of(op, values), update=True)
    graph.replay()
    with pytest.raises(RuntimeError):
        torch_npu.npu.synchronize()


def forked(x: Tensor, streams: SideStream, *, fork: bool = True, join: bool = True) -> Tensor:
    first = x + 1
    if fork:
        streams._side.wait_stream(torch_npu.npu.current_stream())
    with torch_npu.npu.stream(streams._side):
        second = first * 10
    if join:
        streams.join()
    return first + second


def test_two_streams(order: str) -> None:
    x = torch.ones(4, device=NPU)
    streams = SideStream(torch_npu.npu)
    torch_npu.npu.synchronize()
    assert torch.equal(forked(x, streams).cpu(), torch.full((4,), 22.0))
    recorder = NpuRecorder()
    with recorder.session():
        recorder.begin()
        output = forked(x, streams)
        replay = recorder.end()
    for value in (1.0, 2.0):
        x.fill_(value)
        replay(())  # type: ignore[arg-type]
        assert torch.equal(output.cpu(), torch.full((4,), 11 * (value + 1)))


@pytest.mark.parametrize(("order", "fork", "join"), [("early", False, True), ("late", True, False)], indirect=["order"])
def test_a_missing_wait_reads_poison(order: str, fork: bool, join: bool) -> None:
    x = torch.ones(4, device=NPU)
    torch_npu.npu.synchronize()
    assert forked(x, SideStream(torch_npu.npu), fork=fork, join=join).cpu().isnan().all()


@pytest.mark.parametrize("order", ["early"], indirect=True)
def test_a_missing_wait_in_a_graph_reads_poison(order: str) -> None:
    x = torch.ones(4, device=NPU)
    streams = SideStream(torch_npu.npu)

    def work() -> Tensor:
        streams._side.wait_stream(torch_npu.npu.current_stream())
        late = x + 1  # after the fork
        with torch_npu.npu.stream(streams._side):
            output = late * 10
        streams.join()
        return output

    graph, output = captured(work)
    for _ in range(2):
        graph.replay()
        assert output.cpu().isnan().all()


def test_a_capture_must_join_its_streams() -> None:
    x = torch.ones(4, device=NPU)
    streams = SideStream(torch_npu.npu)
    with pytest.raises(RuntimeError, match="107025"):
        captured(lambda: forked(x, streams, join=False))
