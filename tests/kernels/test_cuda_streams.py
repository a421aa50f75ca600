"""Two streams run the same kernel at the same time: nothing that it counts or shares is the other's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from localllm.kernels.ops.case import Case
from localllm.kernels.ops.judge import given, moved
from localllm.kernels.ops.layer import inputs as layer_inputs
from localllm.kernels.ops.linear import Fp8

sys.path.insert(0, str(Path(__file__).parent))
from test_triton_attention import inputs, on_device

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
ROUNDS = 200
Call = Callable[[], Tensor]
DECODE = [[(1, 3000)], [(1, 1700)]]  # a row of many parts each, which are counted and merged
PROMPTS = [[(257, 900), (100, 400)], [(300, 300), (64, 2000)]]


def attention(module: str, lens: list[list[tuple[int, int]]]) -> Iterator[Call]:
    """Calls of a module's attention over caches and rows of their own."""
    library = pytest.importorskip(f"localllm.kernels.{module}", exc_type=ImportError)
    for seed, one in enumerate(lens):
        arguments = on_device(inputs(one, heads=8, kv_heads=2, dim=128, page_size=16, dtype=torch.bfloat16, seed=seed))
        yield lambda arguments=arguments: library.paged_attention(**arguments)


def few_rows() -> Iterator[Call]:
    """Triton's product of few rows, whose shares of the inputs are summed up by the last."""
    linear = pytest.importorskip("localllm.kernels.triton.linear")
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 4096, generator=generator).bfloat16().cuda()
        data = torch.randn(512, 4096, generator=generator).to(torch.float8_e4m3fn).cuda()
        weight = Fp8(data, torch.rand(512, 1, generator=generator).cuda(), 4096)
        held = linear.pack_slices([weight], 512, torch.bfloat16)
        yield lambda x=x, held=held: linear.fp8(x, held)


def steps() -> Iterator[Call]:
    """The same layers of a decode step of one row, over caches of their own."""
    step = pytest.importorskip("localllm.kernels.cuda.step", exc_type=ImportError)
    if not step._hopper(torch.device("cuda")):
        pytest.skip("the kernel is for GPUs of capability 9 alone")
    from localllm.backends.cuda.ops import OPS

    make = layer_inputs([(1, 300)], 8, 2, 64, 256, 192, layers=3, page_size=16)
    case = Case("layer.decoders", "two", make, packs=("stack",))
    plain = make(torch.Generator().manual_seed(1), torch.bfloat16)
    first = given(case, OPS, plain, "cuda", torch.bfloat16)
    assert first["stack"].shape is not None
    for sign in (1, -1):
        own = {name: moved(first[name], "cuda") for name in ("x", "stream", "step")}
        own["x"] *= sign
        yield lambda own=own: torch.cat(OPS.layer.decoders(OPS, first["stack"], **own))


KERNELS: Mapping[str, Callable[[], Iterator[Call]]] = {
    "cuda-decode": lambda: attention("cuda.attention", DECODE),
    "cuda-prompts": lambda: attention("cuda.attention", PROMPTS),
    "triton-decode": lambda: attention("triton.attention", DECODE),
    "triton-few-rows": few_rows,
    "decoder-step": steps,
}


@contextmanager
def beside() -> Iterator[list[torch.cuda.Stream]]:
    """Two streams that begin after, and end before, everything else."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    yield streams
    torch.cuda.synchronize()


@pytest.fixture(params=KERNELS)
def calls(request: pytest.FixtureRequest) -> list[Call]:
    return list(KERNELS[request.param]())


def test_on_two_streams(calls: list[Call]) -> None:
    expected = [call().clone() for call in calls]
    found: list[list[Tensor]] = [[], []]
    with beside() as streams:
        for _ in range(ROUNDS):
            for call, stream, results in zip(calls, streams, found, strict=True):
                with torch.cuda.stream(stream):
                    results.append(call())
    for right, results in zip(expected, found, strict=True):
        assert all(torch.equal(right, one) for one in results)


def test_replayed_on_two_streams(calls: list[Call]) -> None:
    """Captured on two streams, and replayed there while the default stream runs the kernel itself."""
    expected = [call().clone() for call in calls]
    graphs, found = [], []
    with beside() as streams:
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                found.append(call())
            graphs.append(graph)
        right = torch.ones((), dtype=torch.bool, device="cuda")
        for _ in range(ROUNDS):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            right &= (calls[0]() == expected[0]).all()
    assert right
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_captured_on_a_stream_that_never_ran_it(calls: list[Call]) -> None:
    """Two captures, of which the second is replayed first."""
    expected = [call().clone() for call in calls]
    graphs, found = [], []
    with beside() as (stream, _):
        for call in calls:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                found.append(call())
            graphs.append(graph)
        for _ in range(3):
            for number in (1, 0):
                graphs[number].replay()
                assert torch.equal(found[number], expected[number])


@pytest.mark.parametrize("module", ["cuda.attention", "triton.attention"])
def test_rows_that_another_stream_wrote(module: str) -> None:
    """Pages and lengths that are written just before, by a kernel ahead or on a stream that is waited for."""
    library = pytest.importorskip(f"localllm.kernels.{module}", exc_type=ImportError)
    arguments = on_device(inputs([(1, 900), (1, 300)], heads=8, kv_heads=2, dim=128, page_size=16, seed=3))
    rows = arguments["rows"]
    expected = library.paged_attention(**arguments).clone()
    table, lens = rows.page_table.clone(), rows.context_lens.clone()
    right = torch.ones((), dtype=torch.bool, device="cuda")
    with beside() as (one, other):
        for turn in range(ROUNDS):
            with torch.cuda.stream(one if turn % 2 else other):
                rows.page_table.fill_(0)
                rows.context_lens.fill_(1)
                torch.add(table, 0, out=rows.page_table)
                torch.add(lens, 0, out=rows.context_lens)
            other.wait_stream(one)
            with torch.cuda.stream(other):
                right &= (library.paged_attention(**arguments) == expected).all()
            one.wait_stream(other)
    assert right
