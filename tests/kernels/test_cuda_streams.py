"""Two streams run the same kernel at the same time. Each has its own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.layer import inputs as layer_inputs
from localllm.kernels.ops.cases.reference_check import copy_to, device_arguments
from localllm.kernels.ops.linear import Fp8

from .test_triton_attention import inputs, on_device

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
ROUNDS = 60
GATE_CYCLES = 200_000_000  # about 0.1 s: longer than the host needs to start all rounds
Call = Callable[[], Tensor]
DECODE = [[(1, 30_000)], [(1, 17_000)]]  # one row each, divided into unlike numbers of chunks, which are counted
PROMPTS = [[(2500, 3000), (900, 1400)], [(1500, 1500), (2100, 4000)]]  # more tiles than thread blocks: claimed


def attention(module: str, lens: list[list[tuple[int, int]]]) -> Iterator[Call]:
    """Calls of a module's attention, each with its own cache and rows. Missing results are NaN."""
    library = pytest.importorskip(f"localllm.kernels.{module}", exc_type=ImportError)
    for seed, one in enumerate(lens):
        arguments = on_device(inputs(one, heads=8, kv_heads=2, dim=128, page_size=16, dtype=torch.bfloat16, seed=seed))

        def call(arguments: dict[str, Any] = arguments) -> Tensor:
            return library.paged_attention(**arguments, out=torch.full_like(arguments["query"], torch.nan))

        yield call


def small_batch() -> Iterator[Call]:
    """Triton's product of a small batch. The last of the programs that share the inputs adds up their sums."""
    linear = pytest.importorskip("localllm.kernels.triton.linear")
    for seed, in_features in enumerate((16_384, 8_192)):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, in_features, generator=generator).bfloat16().cuda()
        data = torch.randn(512, in_features, generator=generator).to(torch.float8_e4m3fn).cuda()
        weight = Fp8(data, torch.rand(512, 1, generator=generator).cuda(), in_features)
        packed = linear.pack_slices([weight], 512, torch.bfloat16)
        yield lambda x=x, packed=packed: linear.fp8(x, packed)


def steps() -> Iterator[Call]:
    """The same layers of a decode step of one row, with separate caches."""
    step = pytest.importorskip("localllm.kernels.cuda.step.stack", exc_type=ImportError)
    if not step._hopper(torch.device("cuda")):
        pytest.skip("the kernel is for GPUs of capability 9 alone")
    from localllm.backends.cuda.ops import OPS

    make = layer_inputs([(1, 300)], 8, 2, 64, 256, 192, layers=3, page_size=16)
    case = Case("layer.decoders", "two", make, packs=("stack",))
    plain = make(torch.Generator().manual_seed(1), torch.bfloat16)
    first = device_arguments(case, OPS, plain, "cuda", torch.bfloat16)
    assert first["stack"].shape is not None
    for sign in (1, -1):
        own = {name: copy_to(first[name], "cuda") for name in ("x", "stream", "step")}
        own["x"] *= sign
        yield lambda own=own: torch.cat(OPS.layer.decoders(OPS, first["stack"], **own))


KERNELS: Mapping[str, Callable[[], Iterator[Call]]] = {
    "cuda-decode": lambda: attention("cuda.attention.paged", DECODE),
    "cuda-prompts": lambda: attention("cuda.attention.paged", PROMPTS),
    "triton-decode": lambda: attention("triton.attention", DECODE),
    "triton-small-batch": small_batch,
    "decoder-step": steps,
}


@contextmanager
def two_streams() -> Iterator[list[torch.cuda.Stream]]:
    """Two streams whose work starts at the same time, when all of it is queued. Fails if they did not overlap."""
    torch.cuda.synchronize()
    gate = torch.cuda.Stream()
    with torch.cuda.stream(gate):
        torch.cuda._sleep(GATE_CYCLES)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]
    for stream, (start, _) in zip(streams, events, strict=True):
        stream.wait_stream(gate)
        start.record(stream)
    yield streams
    for stream, (_, end) in zip(streams, events, strict=True):
        end.record(stream)
    torch.cuda.synchronize()
    (start, end), (other_start, other_end) = events
    assert start.elapsed_time(other_end) > 0, "the second stream ended before the first started"
    assert other_start.elapsed_time(end) > 0, "the first stream ended before the second started"


@pytest.fixture(params=KERNELS)
def calls(request: pytest.FixtureRequest) -> list[Call]:
    return list(KERNELS[request.param]())


def test_two_streams_run_one_kernel(calls: list[Call]) -> None:
    expected = [call().clone() for call in calls]
    results: list[list[Tensor]] = [[], []]
    with two_streams() as streams:
        for _ in range(ROUNDS):
            for call, stream, tensors in zip(calls, streams, results, strict=True):
                with torch.cuda.stream(stream):
                    tensors.append(call())
    wrong = [
        sum(not torch.equal(right, tensor) for tensor in tensors)
        for right, tensors in zip(expected, results, strict=True)
    ]
    assert wrong == [0, 0]


def test_two_streams_replay_one_kernel(calls: list[Call]) -> None:
    """Each stream replays its capture; the default stream runs the kernel without a graph at the same time."""
    expected = [call().clone() for call in calls]
    graphs, results = [], []
    captures = [torch.cuda.Stream(), torch.cuda.Stream()]
    for call, stream in zip(calls, captures, strict=True):
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append(call())
        graphs.append(graph)
    right = torch.ones(3, dtype=torch.bool, device="cuda")
    with two_streams() as streams:
        torch.cuda.current_stream().wait_stream(streams[0])
        for _ in range(ROUNDS):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    graphs[number].replay()
                    right[number] &= (results[number] == expected[number]).all()
            right[2] &= (calls[0]() == expected[0]).all()
    assert right.tolist() == [True] * 3


def test_capture_on_a_stream_without_an_earlier_step(calls: list[Call]) -> None:
    """Two captures; the second is replayed first."""
    expected = [call().clone() for call in calls]
    graphs, results = [], []
    stream = torch.cuda.Stream()
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append(call())
        graphs.append(graph)
    for _ in range(3):
        for number in (1, 0):
            graphs[number].replay()
            assert torch.equal(results[number], expected[number])


@pytest.mark.parametrize("module", ["cuda.attention.paged", "triton.attention"])
def test_row_tables_written_by_the_previous_kernel(module: str) -> None:
    """The previous kernel writes page table and lengths, on the same stream or on a stream that this one waits for."""
    library = pytest.importorskip(f"localllm.kernels.{module}", exc_type=ImportError)
    arguments = on_device(inputs([(1, 900), (1, 300)], heads=8, kv_heads=2, dim=128, page_size=16, seed=3))
    rows = arguments["rows"]
    expected = library.paged_attention(**arguments).clone()
    table, lens = rows.page_table.clone(), rows.context_lens.clone()
    right = torch.ones((), dtype=torch.bool, device="cuda")
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for number in range(ROUNDS):
        with torch.cuda.stream(one if number % 2 else other):
            rows.page_table.fill_(0)
            rows.context_lens.fill_(1)
            torch.add(table, 0, out=rows.page_table)
            torch.add(lens, 0, out=rows.context_lens)
        other.wait_stream(one)
        with torch.cuda.stream(other):
            right &= (library.paged_attention(**arguments) == expected).all()
        one.wait_stream(other)
    torch.cuda.synchronize()
    assert right
