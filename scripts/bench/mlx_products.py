"""Products of few rows on MLX: microseconds of our kernel beside those of MLX's own, whichever device it computes on.

`python scripts/bench/mlx_products.py [--shapes qwen3-0.6b,qwen3-8b] [--rows 2,8,16]` measures the products of a model's
layer, those of one input joined, and its head. Each figure is of a chain that is evaluated at once, as a step is, and
whose weights take turns beyond the second-level cache. What a product takes to prepare counts (`host` and `peer_host`:
that alone, all that happens before the chain is waited for), and so does what makes the next depend on it (`between`: a
chain of nothing else). The two take turns (A B B A), figures are medians over the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import mlx.core as mx
from rows import Row, row, save
from shapes import SHAPES, Shape

from localllm.backends import mlx
from localllm.engine.runner import DeviceInfo
from localllm.kernels.mlx_cuda import few_rows

TURNS_BYTES, MOST_TURNS = 2**28, 128  # of weights that take turns
LEAST_CHAIN = 32  # products
READ_BYTES = 2**31

Compute = Callable[[mx.array, mx.array, mx.array], mx.array]


class Weight(NamedTuple):
    """[outputs, inputs] bfloat16, and its transpose as it lies ready in a model."""

    own: mx.array
    turned: mx.array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--rows", default="2,8,16")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--save", default="mlx_products", help="which results to replace; empty: none")
    options = parser.parse_args()
    shapes, counts = options.shapes.split(","), [int(count) for count in options.rows.split(",")]
    for figure in measure({name: SHAPES[name] for name in shapes}, counts, options.pairs, READ_BYTES):
        save(options.save, [figure], part=True)  # at once: a later one may not end


def measure(shapes: Mapping[str, Shape], counts: list[int], pairs: int, read_bytes: int) -> Iterator[Row]:
    found = mlx.probe()
    assert isinstance(found, DeviceInfo)
    ceiling = reading(read_bytes, pairs)
    yield row("mlx products, ceiling, reading", ceiling / 1e9, "GB/s", device=found.name, pairs=pairs)
    for name, shape in shapes.items():
        for label, (outputs, inputs) in products(shape).items():
            weights = turns(outputs, inputs)
            for rows in counts:
                yield figure(
                    f"mlx products {name} {label}, {inputs} to {outputs}, {rows} rows",
                    timed(rows, weights, pairs),
                    least=1e6 * 2 * (outputs * inputs + rows * (inputs + outputs)) / ceiling,
                    device=found.name,
                )


def figure(title: str, taken: list[tuple[Times, Times, Times]], least: float, device: str) -> Row:
    """`least`: microseconds that reading takes at the ceiling."""
    ours, peer, between = (
        Times(*(statistics.median(each) for each in zip(*side, strict=True))) for side in zip(*taken, strict=True)
    )
    return row(
        title,
        ours.whole,
        "µs",
        peer=round(peer.whole, 2),
        ratio=statistics.median(theirs.whole / mine.whole for mine, theirs, _ in taken),
        bound_share=least / ours.whole,
        host=round(ours.host, 2),
        peer_host=round(peer.host, 2),
        between=round(between.whole, 2),
        device=device,
        pairs=len(taken),
    )


def products(shape: Shape) -> Mapping[str, tuple[int, int]]:
    """(outputs, inputs) by name."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "qkv": (queries + 2 * keys, shape.hidden),
        "o": (shape.hidden, queries),
        "gate and up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
        "head": (shape.vocab, shape.hidden),
    }


def turns(outputs: int, inputs: int) -> list[Weight]:
    made = []
    for _ in range(min(MOST_TURNS, max(2, -(-TURNS_BYTES // (2 * outputs * inputs))))):
        own = (mx.random.normal((outputs, inputs)) * inputs**-0.5).astype(mx.bfloat16)
        made.append(Weight(own, own.T))
        mx.eval(made[-1])
    return made


class Times(NamedTuple):
    """Microseconds of one product of a chain."""

    whole: float
    host: float  # until all of it was handed to the device


def timed(rows: int, weights: list[Weight], pairs: int) -> list[tuple[Times, Times, Times]]:
    """Of each pair: of our kernel, of MLX's own, of neither."""
    x = mx.random.normal((rows, 1, weights[0].own.shape[1])).astype(mx.bfloat16)  # as a step has them
    looked_at(few_rows.product, x, weights[0])
    given = x @ weights[0].turned
    sides: list[Compute] = [few_rows.product, _plain, lambda taken, *_: mx.depends(given, taken)]
    for side in sides:
        chain(side, x, weights)  # the first of each compiles and fills caches
    taken = []
    for pair in range(pairs):
        order = (0, 1, 2) if pair % 2 == 0 else (2, 1, 0)
        times = {side: chain(sides[side], x, weights) for side in order}
        taken.append((times[0], times[1], times[2]))
    return taken


def chain(compute: Compute, x: mx.array, weights: list[Weight]) -> Times:
    """Each product waits for the one before, as in a model."""
    length = max(LEAST_CHAIN, len(weights))
    began, taken = time.perf_counter(), x
    for at in range(length):
        taken = mx.maximum(x, compute(taken, *weights[at % len(weights)])[..., :1])
    mx.async_eval(taken)
    prepared = time.perf_counter()
    mx.eval(taken)
    return Times(*(1e6 * (ended - began) / length for ended in (time.perf_counter(), prepared)))


def _plain(x: mx.array, _: mx.array, turned: mx.array) -> mx.array:
    return x @ turned


def looked_at(compute: Compute, x: mx.array, weight: Weight) -> None:
    """A figure of a wrong answer would be none."""
    expected = x.astype(mx.float32) @ weight.turned.astype(mx.float32)
    error = mx.abs(compute(x, *weight).astype(mx.float32) - expected).max().item()
    if not error <= 2**-6 * mx.abs(expected).max().item():
        raise SystemExit(f"{x.shape} times {weight.own.shape}: wrong by {error}")


def reading(size: int, rounds: int) -> float:
    """Bytes a second, by the fastest of MLX's own ways: the sum of all or of each row, or a copy, which writes, too."""
    source = mx.random.normal((size // 4 // 2**12, 2**12))
    mx.eval(source)
    ways: list[tuple[int, Callable[[], mx.array]]] = [
        (source.nbytes, source.sum),
        (source.nbytes, lambda: source.sum(axis=-1)),
        (2 * source.nbytes, lambda: mx.abs(source)),
    ]
    speeds = []
    for moved, way in ways:
        for _ in range(rounds + 1):
            began = time.perf_counter()
            mx.eval(way())
            speeds.append(moved / (time.perf_counter() - began))
    return max(speeds)


if __name__ == "__main__":
    main()
