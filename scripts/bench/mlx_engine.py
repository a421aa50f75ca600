"""Our whole engine on MLX beside mlx-lm's plain loop of the same model, whichever device MLX computes on.

`python scripts/bench/mlx_engine.py --shape qwen3-0.6b --rows 1,2,8,32`: decode at equal lengths (against the loop), at
very different lengths (against equal ones of as many tokens in all), and the first token with and without a prefix that
was computed before. Weights are random; the two take turns (A B B A), figures are medians over the pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model, save_model
from rows import Row, row, save
from shapes import SHAPES, Shape

from localllm.backends import mlx
from localllm.engine.engine import Engine
from localllm.engine.modelfiles import read_model
from localllm.engine.request import Request
from localllm.engine.runner import Budget, DeviceInfo, Runner

CONTEXT, STEPS, WARM = 128, 64, 8  # tokens
LONG, QUESTION = 4096, 16  # tokens of a prefix and of what follows it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", default="1,2,8,32")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--quant", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--save", default="mlx", help="which results to replace; empty: none")
    options = parser.parse_args()
    counts = [int(count) for count in options.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(SHAPES[options.shape], Path(folder))
        save(options.save, measure(Path(folder), options.shape, counts, options.pairs, options.quant), part=True)


def checkpoint(shape: Shape, folder: Path) -> None:
    """The shape with random weights, as mlx-lm saves a model."""
    config = dict(shape.config())
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.update(
        tree_map(lambda weight: (mx.random.normal(weight.shape) * 0.02).astype(mx.bfloat16), model.parameters())
    )
    save_model(folder, model, donate_model=True)
    (folder / "config.json").write_text(json.dumps(config))


def measure(folder: Path, name: str, counts: list[int], pairs: int, quant: Any) -> Iterator[Row]:
    found = mlx.probe()
    assert isinstance(found, DeviceInfo)
    budget = Budget(context=2 * LONG, max_rows=max(counts), cache_bytes=2**34, quant=quant)
    runner, peer = mlx.open(read_model(folder), budget), load_model(folder)[0]
    if quant != "none":
        nn.quantize(peer, 64, {"int8": 8, "int4": 4}[quant])
    title = f"{name} {'bf16' if quant == 'none' else quant}"
    for count in counts:
        ours, theirs = turns(
            pairs, lambda n=count: engine_rate(runner, [CONTEXT] * n), lambda n=count: loop_rate(peer, n)
        )
        yield row(
            f"mlx {title} decode {count} x {CONTEXT}", ours, "tok/s", peer=round(theirs, 1), ratio=ours / theirs,
            device=found.name,
        )  # fmt: skip
    yield prefix(runner, pairs, title, found.name)
    if max(counts) >= 8:
        yield uneven(runner, max(counts), pairs, title, found.name)


def turns(pairs: int, one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
    """Medians of both, A B B A, after one of each that does not count."""
    one(), other()
    mine, theirs = [], []
    for pair in range(pairs):
        for measured, taken in ((one, mine), (other, theirs)) if pair % 2 == 0 else ((other, theirs), (one, mine)):
            taken.append(measured())
    return statistics.median(mine), statistics.median(theirs)


def engine_rate(runner: Runner, lengths: list[int]) -> float:
    """Tokens per second of rows that decode, each with a prompt of its own."""
    engine, rng = Engine(Kept(runner)), np.random.default_rng()
    for at, length in enumerate(lengths):
        prompt = rng.integers(3, runner.spec.vocab_size, length).tolist()
        engine.submit(Request(str(at), tuple(prompt), STEPS + WARM + 1))
    seen = 0
    while seen < WARM * len(lengths):
        seen += len(engine.step())
    began, seen = time.perf_counter(), 0
    while engine.has_work:
        deltas = engine.step()
        seen += len(deltas)
        if any(delta.finish for delta in deltas):
            break
    seconds = time.perf_counter() - began
    while engine.has_work:
        engine.step()
    return seen / seconds


class Kept:
    """The runner, which outlives the engine."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.spec = runner, runner.spec
        self.run, self.load_adapter = runner.run, runner.load_adapter

    def close(self) -> None:
        pass


def loop_rate(model: nn.Module, rows: int) -> float:
    """mlx-lm's own caches in a loop that evaluates one step while it builds the next.

    Rows of one length need none of what BatchKVCache does for others, which costs a third of the speed on CUDA.
    """
    caches = make_prompt_cache(model)
    prompt = mx.random.randint(3, 250, (rows, CONTEXT))
    token = mx.argmax(model(prompt, cache=caches)[:, -1], axis=-1)
    mx.eval(token)
    began = 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            began = time.perf_counter()
        following = mx.argmax(model(token[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(following)
        token.tolist()
        token = following
    mx.eval(token)
    return rows * STEPS / (time.perf_counter() - began)


def uneven(runner: Runner, count: int, pairs: int, title: str, device: str) -> Row:
    """Rows of 64 to about 2,000 tokens beside as many of their mean length."""
    lengths = np.geomspace(64, 2048, count).astype(int).tolist()
    same = [sum(lengths) // count] * count
    ours, theirs = turns(pairs, lambda: engine_rate(runner, lengths), lambda: engine_rate(runner, same))
    name = f"mlx {title} decode {count} rows of 64…2048 tokens, peer: all of {same[0]}"
    return row(name, ours, "tok/s", peer=round(theirs, 1), ratio=ours / theirs, device=device)


def prefix(runner: Runner, pairs: int, title: str, device: str) -> Row:
    """Seconds to the first token of a prompt whose first LONG tokens were computed before, and were not."""
    rng = np.random.default_rng()

    def first_token(engine: Engine, prompt: list[int]) -> float:
        began = time.perf_counter()
        engine.submit(Request("a", tuple(prompt), 1))
        while not engine.step():
            pass
        seconds = time.perf_counter() - began
        while engine.has_work:
            engine.step()
        return seconds

    cold, hit = [], []
    for _ in range(pairs + 1):
        engine, shared = Engine(Kept(runner)), rng.integers(3, runner.spec.vocab_size, LONG).tolist()
        for taken in (cold, hit):
            taken.append(first_token(engine, shared + rng.integers(3, runner.spec.vocab_size, QUESTION).tolist()))
    one, other = (1e3 * statistics.median(taken[1:]) for taken in (hit, cold))
    name = f"mlx {title} first token after {LONG} tokens that were there, peer: that were not"
    return row(name, one, "ms", peer=round(other, 2), ratio=other / one, device=device)


if __name__ == "__main__":
    main()
