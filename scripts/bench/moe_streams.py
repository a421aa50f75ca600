"""The shared expert on a second queue of this GPU: microseconds of the MLP of one layer in a graph, beside one queue.

`python scripts/bench/moe_streams.py [--steps STEPS] [--tokens 1,64] [FORMAT …]`. The layers have the sizes of
Qwen2-57B-A14B and of Qwen3.6-35B-A3B. The result is the time with the queues that ParallelExperts chooses, the peer the
time with one queue. `--steps` compares the bits of both for so many steps instead; the input of a step is the output of
the step before.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from cuda_linear import GROUP, microseconds, weight_of
from rows import Row, parser, row, save
from torch import Tensor

from localllm.backends.cuda.device import DEVICE
from localllm.backends.pytorch.graphs.parallel import LAYERS, ParallelExperts, SharedExperts
from localllm.kernels.ops.attention import Rows
from localllm.kernels.ops.mlp import Experts, GatedMlp
from localllm.kernels.ops.moe import ExpertWeights, Routing
from localllm.kernels.ops.projection import Product
from localllm.kernels.ops.step import Cache, LayerStep
from localllm.kernels.ops.streams import IN_ORDER, Streams

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
ROUNDS = 9
OPS = DEVICE.ops
STEPS = 10  # of a graph with --steps
COMPARED = 1000  # steps between two comparisons of bits
SMALL_TOKENS = 16


class Shape(NamedTuple):
    title: str
    hidden: int
    experts: int
    inner: int
    shared: int


QWEN3 = Shape("35B-A3B", 2048, 256, 512, 512)
QWEN2 = Shape("57B-A14B", 3584, 64, 2560, 20480)
SMALL = Shape("small", 512, 16, 256, 512)  # for --steps


def candidates() -> tuple[Streams, ...]:
    """One queue, then a fork before the router, then a fork after the router."""
    return IN_ORDER, DEVICE.streams(), DEVICE.streams(after_router=True)


def product(op: str, out_features: int, in_features: int) -> Product:
    return Product(op, OPS.linear.pack(weight_of(op, out_features, in_features, GROUP), torch.bfloat16))


def random_mlp(shape: Shape, op: str) -> Experts:
    hidden = shape.hidden
    gate_up = weight_of(op, shape.experts * 2 * shape.inner, hidden, GROUP)
    down = weight_of(op, shape.experts * hidden, shape.inner, GROUP)
    weights = ExpertWeights(op, gate_up, down, shape.experts, shape.inner, "silu_and_mul")
    return Experts(
        router=product("dense", shape.experts, hidden),
        routing=Routing(8, "softmax", True),
        correction=None,
        weights=OPS.moe.pack(weights, torch.bfloat16),
        shared=GatedMlp(product(op, 2 * shape.shared, hidden), product(op, hidden, shape.shared), "silu_and_mul"),
        shared_gate=product("dense", 1, hidden),
    )


def step_on(streams: Streams) -> LayerStep:
    empty = torch.empty(0, dtype=torch.int32, device="cuda")
    return LayerStep(Rows(empty, empty, empty.view(0, 0), (), ()), empty, (), Cache((), ()), streams=streams)


def captured(work: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of the work, which has run without a graph before, and its results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


def measure_shape(shape: Shape, op: str, counts: list[int]) -> Iterator[Row]:
    mlps = [random_mlp(shape, op) for _ in range(LAYERS)]
    choice = ParallelExperts(DEVICE, SharedExperts(mlps, shape.hidden, torch.bfloat16))
    for tokens in counts:
        chosen = choice.streams(tokens)
        inputs = [torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in mlps]

        def layers(streams: Streams, inputs: list[Tensor] = inputs) -> list[Tensor]:
            step = step_on(streams)
            return [mlp(x, OPS, step) for mlp, x in zip(mlps, inputs, strict=True)]

        layers(IN_ORDER)
        captures = [captured(partial(layers, streams)) for streams in candidates()]
        for _, results in captures:
            equal = all(torch.equal(one, other) for one, other in zip(results, captures[0][1], strict=True))
            assert equal, "the results with one and with two queues differ"
        rounds = [[microseconds(graph, LAYERS) for graph, _ in captures] for _ in range(ROUNDS + 1)][1:]
        times = [statistics.median(values) for values in zip(*rounds, strict=True)]
        used = 0 if chosen is IN_ORDER else 1 + chosen.after_router
        yield row(
            f"moe.{op}, {shape.title}, {tokens} tokens",
            times[used],
            "µs",
            peer=round(times[0], 2),
            ratio=statistics.median(values[0] / values[used] for values in rounds),
            fork=("none", "before the router", "after the router")[used],
            before_router=round(times[1], 2),
            after_router=round(times[2], 2),
            device=torch.cuda.get_device_name(),
            rounds=ROUNDS,
        )


def compare_bits(steps: int) -> Iterator[Row]:
    """One row: the number of steps with equal bits."""
    mlp = random_mlp(SMALL, "dense")
    noise = torch.randn(STEPS, SMALL_TOKENS, SMALL.hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(SMALL.hidden, device="cuda", dtype=torch.bfloat16)

    def run(state: Tensor, streams: Streams) -> list[Tensor]:
        step = step_on(streams)
        for index in range(STEPS):
            state.copy_(OPS.norm.rms(mlp(state, OPS, step) + noise[index], weight, 1e-6))
        return [state]

    states = [noise[0].clone() for _ in candidates()]
    run(noise[0].clone(), IN_ORDER)
    graphs = [captured(partial(run, state, streams))[0] for state, streams in zip(states, candidates(), strict=True)]
    done = 0
    while done < steps:
        for _ in range(COMPARED // STEPS):
            for graph in graphs:
                graph.replay()
        done += COMPARED
        equal = all(torch.equal(state, states[0]) for state in states)
        assert equal, f"the bits differ after {done} steps"
        assert states[0].isfinite().all()
        if done % (100 * COMPARED) == 0:
            print(f"{done} steps have equal bits", file=sys.stderr, flush=True)
    yield row("moe.streams, steps with equal bits", done, "steps", device=torch.cuda.get_device_name())


def measure(formats: list[str], counts: list[int]) -> Iterator[Row]:
    for op in formats:
        for shape in (QWEN3, QWEN2):
            yield from measure_shape(shape, op, counts)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=0, help="compare the bits of so many steps")
    arguments.add_argument("--tokens", help="numbers of tokens; default: all")
    arguments.add_argument("formats", nargs="*")
    options = arguments.parse_args()
    counts = [int(count) for count in options.tokens.split(",")] if options.tokens else list(TOKENS)
    with torch.inference_mode():
        if options.steps:
            save("moe_streams", compare_bits(options.steps), part=True)
        else:
            save("moe_streams", measure(options.formats or ["dense"], counts), part=True)
