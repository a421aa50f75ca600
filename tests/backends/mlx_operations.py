"""Counts the graph operations of a decode step on MLX: those of the runner and those of mlx-lm's own loops.

They are the operations of the graph that each step passes to mx.async_eval. One row is compared with
mlx_lm.generate.generate_step, several rows of different lengths with mlx_lm.generate.BatchGenerator.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step

from localllm.engine.engine import Engine
from localllm.engine.lora import Adapter
from localllm.engine.request import Request
from localllm.engine.runner import Runner

STEPS = 12  # decode steps; the last step is counted


def prompts(rows: int) -> list[list[int]]:
    return [[5 + row] * (20 + row) for row in range(rows)]


def of_runner(runner: Runner, texts: list[list[int]], adapter: Adapter | None = None) -> int:
    """Operations of the last decode step of all rows, by the runner."""
    engine = Engine(runner)
    if adapter is not None:
        engine.register_adapter(adapter)
    for number, text in enumerate(texts):
        engine.submit(Request(str(number), tuple(text), STEPS, adapter=adapter))
    with counted() as counts:
        for _ in range(STEPS - 2):
            engine.step()
    while engine.has_work:
        engine.step()
    return counts[-1]


def of_mlx_lm(model: nn.Module, texts: list[list[int]]) -> int:
    """Operations of the last decode step of all rows, by mlx-lm."""
    with counted() as counts:
        if len(texts) == 1:
            for _ in generate_step(mx.array(texts[0]), model, max_tokens=STEPS):
                pass
            return counts[-1]
        generator = BatchGenerator(model, max_tokens=STEPS)
        generator.insert(texts)
        for _ in range(STEPS):
            generator.next()
        last = counts[-1]
        generator.close()
    return last


@contextmanager
def counted() -> Iterator[list[int]]:
    """Operations of each graph that mx.async_eval gets."""
    counts: list[int] = []
    evaluate: Callable[..., None] = mx.async_eval

    def counting(*arrays: Any) -> None:
        counts.append(operations([x for _, x in tree_flatten(arrays) if isinstance(x, mx.array)]))
        evaluate(*arrays)

    mx.async_eval = counting
    try:
        yield counts
    finally:
        mx.async_eval = evaluate


def operations(arrays: list[mx.array]) -> int:
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count("shape=rectangle")
