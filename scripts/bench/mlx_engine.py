"""Our whole engine on MLX beside mlx-lm's plain loop of the same model, whichever device MLX computes on.

`python scripts/bench/mlx_engine.py --shape qwen3-0.6b --rows 1,2,8,32` measures, in the order of --parts:

- decode: tokens a second while all rows run, none with a prompt to compute: the loop's steps beside as many of ours, at
  the same context (`--rows`); and the whole, from the first prompt to the last token. The loop gets all prompts as one
  array at once and knows when each ends; the engine gets requests;
- uneven: decode of rows of very different length, beside as many of their mean length;
- prefix: time to the first token where the prompt's first 4,096 tokens were computed before, and were not; and where
  attention has met no prompt of these lengths, for which MLX may have to prepare.

Weights are random; the two take turns (A B B A), figures are medians over the pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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
from localllm.engine.options import LoadOptions
from localllm.engine.request import Delta, Request
from localllm.engine.runner import DeviceInfo, Runner

CONTEXT, STEPS, WARM = 128, 64, 8  # tokens
LONG, QUESTION = 4096, 16  # tokens of a prefix and of what follows it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", default="1,2,8,32")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--quant", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--save", default="mlx", help="which results to replace; empty: none")
    options = parser.parse_args()
    counts = [int(count) for count in options.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(SHAPES[options.shape], Path(folder))
        bench = Bench(Path(folder), options.shape, options.quant, options.pairs, counts)
        for part in options.parts.split(","):
            for figure in PARTS[part](bench):
                save(options.save, [figure], part=True)  # at once: a later one may not end


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


class Bench:
    """The model on our runner, as mlx-lm loads it, and what is asked of both."""

    def __init__(self, folder: Path, shape: str, quant: Any, pairs: int, counts: list[int]) -> None:
        found = mlx.probe()
        assert isinstance(found, DeviceInfo)
        self.device, self.pairs, self.counts, self._folder, self._quant = found.name, pairs, counts, folder, quant
        self.title = f"mlx {shape} {'bf16' if quant == 'none' else quant}"
        options = LoadOptions(context=2 * LONG, max_rows=max(counts), cache_bytes=2**34, quant=quant)
        self.runner = mlx.open(read_model(folder), options)

    @cached_property
    def peer(self) -> nn.Module:
        model = load_model(self._folder)[0]
        if self._quant != "none":
            nn.quantize(model, 64, {"int8": 8, "int4": 4}[self._quant])
        return model

    def row(self, name: str, ours: float, theirs: float, unit: str = "tok/s") -> Row:
        ratio = ours / theirs if unit == "tok/s" else theirs / ours
        return row(f"{self.title} {name}", ours, unit, peer=round(theirs, 2), ratio=ratio, device=self.device)


class Rates(NamedTuple):
    """Tokens per second."""

    steady: float  # while all rows decode
    whole: float  # of all tokens, from the first prompt on


def turns(pairs: int, one: Callable[[], Rates], other: Callable[[], Rates]) -> tuple[Rates, Rates]:
    """Medians of both, A B B A, after one of each that does not count."""
    one(), other()
    mine, theirs = list[Rates](), list[Rates]()
    for pair in range(pairs):
        for measured, taken in ((one, mine), (other, theirs)) if pair % 2 == 0 else ((other, theirs), (one, mine)):
            taken.append(measured())
    return _median(mine), _median(theirs)


def _median(taken: list[Rates]) -> Rates:
    return Rates(*(statistics.median(each) for each in zip(*taken, strict=True)))


def decode(bench: Bench) -> Iterator[Row]:
    for count in bench.counts:
        ours, theirs = turns(
            bench.pairs,
            lambda n=count: engine_rates(bench.runner, [CONTEXT] * n),
            lambda n=count: loop_rates(bench.peer, n),
        )
        yield bench.row(f"decode {count} x {CONTEXT}", ours.steady, theirs.steady)
        yield bench.row(f"prompts and decode {count} x {CONTEXT}", ours.whole, theirs.whole)


def engine_rates(runner: Runner, lengths: list[int]) -> Rates:
    """Of rows with a prompt of their own each."""
    engine, rng = Engine(Kept(runner)), np.random.default_rng()
    for at, length in enumerate(lengths):
        prompt = rng.integers(3, runner.spec.vocab_size, length).tolist()
        engine.submit(Request(str(at), tuple(prompt), STEPS + WARM + 1))
    seen, began = Counter[str](), time.perf_counter()
    while len(seen) < len(lengths) or min(seen.values()) < WARM:
        seen.update(delta.request_id for delta in stepped(engine))
    steady, decoded = time.perf_counter(), 0
    while engine.has_work:
        deltas = stepped(engine)
        decoded += len(deltas)
        if any(delta.finish for delta in deltas):
            break
    ended = time.perf_counter()
    while engine.has_work:
        stepped(engine)
    return Rates(decoded / (ended - steady), len(lengths) * (STEPS + WARM + 1) / (time.perf_counter() - began))


def stepped(engine: Engine) -> list[Delta]:
    """What a step gave; a request that ends before its last token would make a figure of nothing."""
    deltas = engine.step()
    for delta in deltas:
        if delta.finish not in (None, "length"):
            raise SystemExit(f"request {delta.request_id} ended early: {delta.finish}")
    return deltas


class Kept:
    """The runner, which outlives the engine."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.spec = runner, runner.spec
        self.run, self.load_adapter = runner.run, runner.load_adapter

    def close(self) -> None:
        pass


def loop_rates(model: nn.Module, rows: int) -> Rates:
    """mlx-lm's own caches in a loop that evaluates one step while it builds the next.

    Rows of one length need no BatchKVCache.
    """
    caches, prompt = make_prompt_cache(model), mx.random.randint(3, 250, (rows, CONTEXT))
    mx.eval(prompt)
    began = steady = time.perf_counter()
    token = mx.argmax(model(prompt, cache=caches)[:, -1], axis=-1)
    mx.eval(token)
    for step in range(WARM + STEPS):
        if step == WARM:
            steady = time.perf_counter()
        following = mx.argmax(model(token[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(following)
        token.tolist()
        token = following
    mx.eval(token)
    ended = time.perf_counter()
    return Rates(rows * STEPS / (ended - steady), rows * (STEPS + WARM + 1) / (ended - began))


def _lengths(count: int) -> list[int]:
    return np.geomspace(64, 2048, count).astype(int).tolist()


def uneven(bench: Bench) -> Iterator[Row]:
    count = max(bench.counts)
    lengths = _lengths(count)
    same = [sum(lengths) // count] * count
    ours, theirs = turns(
        bench.pairs, lambda: engine_rates(bench.runner, lengths), lambda: engine_rates(bench.runner, same)
    )
    yield bench.row(f"decode {count} rows of 64…2048 tokens, peer: all of {same[0]}", ours.steady, theirs.steady)


def first_tokens(bench: Bench, length: int, less: int) -> tuple[float, float]:
    """Seconds to the first token where a prompt's first `length` tokens were not there, and then where so many but
    `less` were."""
    rng, vocab, engine = np.random.default_rng(), bench.runner.spec.vocab_size, Engine(Kept(bench.runner))
    shared, found = rng.integers(3, vocab, length).tolist(), list[float]()
    for common in (shared, shared[: length - less]):
        began = time.perf_counter()
        engine.submit(Request("a", (*common, *rng.integers(3, vocab, QUESTION).tolist()), 1))
        while not engine.step():
            pass
        found.append(time.perf_counter() - began)
        while engine.has_work:
            engine.step()
    return found[0], found[1]


def prefix(bench: Bench) -> Iterator[Row]:
    for told, more in (("", 0), (", of a length never met", 64)):
        pairs = [first_tokens(bench, LONG + pair * more, more // 2) for pair in range(bench.pairs + 1)][1:]
        cold, hit = (1e3 * statistics.median(taken) for taken in zip(*pairs, strict=True))
        yield bench.row(f"first token after {LONG} tokens that were there, peer: that were not{told}", hit, cold, "ms")


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "decode": decode,
    "uneven": uneven,
    "prefix": prefix,
}


if __name__ == "__main__":
    main()
