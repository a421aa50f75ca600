"""The engine on MLX beside a loop of mlx-lm with the same model, on the device that MLX uses.

`python scripts/bench/mlx_engine.py --shape qwen3-0.6b --rows 1,2,8,32` measures, in the order of --parts:

- decode: tokens per second while all rows decode, after the prompts, at the same context as the loop (`--rows`); and
  tokens per second from the first prompt to the last token. The loop gets all prompts as one array and knows their
  ends; the engine gets requests;
- uneven: decode of rows of very different lengths, beside as many rows of their mean length;
- adapters: decode while each row uses one of four adapters, beside the base model;
- prefix: time to the first token of a prompt whose first 4,096 tokens are cached, beside a prompt without a prefix hit;
  again with new lengths, for which MLX may have to compile.

Weights are random. The programs alternate (A B B A); results are medians over the pairs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from lora import write_adapter
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model, save_model
from rows import Row, parser, row, save
from shapes import SHAPES, Shape

from localllm.backends import mlx
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.request import Delta, Request
from localllm.engine.runner import DeviceInfo, Runner

CONTEXT = 128  # tokens
STEPS = 64
WARMUP = 8  # steps
PREFIX = 4096  # tokens
ADAPTERS = 4
RANK = 16
QUESTION = 16  # tokens after the prefix


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    arguments.add_argument("--layers", type=int, default=0, help="number of layers; 0: all of the shape")
    arguments.add_argument("--rows", default="1,2,8,32")
    arguments.add_argument("--parts", default=",".join(PARTS))
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--quant", choices=["none", "int8", "int4"], default="none")
    arguments.add_argument("--save", default="mlx", help="which results to replace; empty: none")
    options = arguments.parse_args()
    counts = [int(count) for count in options.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[options.shape]
        name = options.shape
        if options.layers:
            shape = replace(shape, layers=options.layers)
            name = f"{name} {options.layers} layers"
        checkpoint(shape, Path(folder))
        bench = Bench(Path(folder), shape, name, options.quant, options.pairs, counts)
        for part in options.parts.split(","):
            for figure in PARTS[part](bench):
                save(options.save, [figure], part=True)  # at once: a later measurement may fail


def checkpoint(shape: Shape, folder: Path) -> None:
    """Save a model of this shape with random weights as mlx-lm does."""
    config = dict(shape.config())
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.update(
        tree_map(lambda weight: (mx.random.normal(weight.shape) * 0.02).astype(mx.bfloat16), model.parameters())
    )
    save_model(folder, model, donate_model=True)
    (folder / "config.json").write_text(json.dumps(config))


class Bench:
    """One model, loaded by localllm and by mlx-lm, and the parameters of the measurements."""

    def __init__(self, folder: Path, shape: Shape, name: str, quant: Any, pairs: int, counts: list[int]) -> None:
        device = mlx.probe()
        assert isinstance(device, DeviceInfo)
        self.device = device.name
        self.pairs = pairs
        self.counts = counts
        self.folder = folder
        self.shape = shape
        self._quant = quant
        self.title = f"mlx {name} {'bf16' if quant == 'none' else quant}"
        options = LoadOptions(context=2 * PREFIX, max_rows=max(counts), cache_bytes=2**34, quant=quant)
        self.runner = mlx.open(read_model(folder), options)

    @cached_property
    def peer(self) -> nn.Module:
        model = load_model(self.folder)[0]
        if self._quant != "none":
            nn.quantize(model, 64, {"int8": 8, "int4": 4}[self._quant])
        return model

    def row(self, name: str, value: float, peer: float, unit: str = "tok/s") -> Row:
        ratio = value / peer if unit == "tok/s" else peer / value
        return row(f"{self.title} {name}", value, unit, peer=round(peer, 2), ratio=ratio, device=self.device)


class Rates(NamedTuple):
    """Tokens per second."""

    steady: float  # while all rows decode
    overall: float  # of all tokens, from the first prompt on


def alternate(pairs: int, first: Callable[[], Rates], second: Callable[[], Rates]) -> tuple[Rates, Rates]:
    """Medians of both measurements. The order alternates (A B B A), after a warm-up."""
    order = [first, second]
    rates: dict[Callable[[], Rates], list[Rates]] = {first: [], second: []}
    for measure in order:
        measure()
    for _ in range(pairs):
        for measure in order:
            rates[measure].append(measure())
        order.reverse()
    return _median(rates[first]), _median(rates[second])


def _median(rates: list[Rates]) -> Rates:
    return Rates(*map(statistics.median, zip(*rates, strict=True)))


def decode(bench: Bench) -> Iterator[Row]:
    for count in bench.counts:
        localllm, peer = alternate(
            bench.pairs,
            lambda n=count: engine_rates(bench.runner, [CONTEXT] * n),
            lambda n=count: loop_rates(bench.peer, n),
        )
        yield bench.row(f"decode {count} x {CONTEXT}", localllm.steady, peer.steady)
        yield bench.row(f"prompts and decode {count} x {CONTEXT}", localllm.overall, peer.overall)


def engine_rates(runner: Runner, lengths: list[int], adapters: Sequence[Adapter] = ()) -> Rates:
    """The rates of rows with different prompts of these lengths. The rows take turns in the use of the adapters."""
    engine = Engine(SharedRunner(runner))
    for adapter in adapters:
        engine.register_adapter(adapter)
    rng = np.random.default_rng()
    for index, length in enumerate(lengths):
        prompt = rng.integers(3, runner.spec.vocab_size, length).tolist()
        adapter = adapters[index % len(adapters)] if adapters else None
        engine.submit(Request(str(index), tuple(prompt), STEPS + WARMUP + 1, adapter=adapter))
    began = time.perf_counter()
    tokens = Counter[str]()  # of each request
    while len(tokens) < len(lengths) or min(tokens.values()) < WARMUP:
        tokens.update(delta.request_id for delta in step_deltas(engine))
    steady = time.perf_counter()
    decoded = 0
    while engine.has_work:
        deltas = step_deltas(engine)
        decoded += len(deltas)
        if any(delta.finish for delta in deltas):
            break
    ended = time.perf_counter()
    while engine.has_work:
        step_deltas(engine)
    return Rates(decoded / (ended - steady), len(lengths) * (STEPS + WARMUP + 1) / (time.perf_counter() - began))


def step_deltas(engine: Engine) -> list[Delta]:
    """The deltas of one step. Exits if a request ended early, as the result would be wrong."""
    deltas = engine.step()
    for delta in deltas:
        if delta.finish not in (None, "length"):
            raise SystemExit(f"request {delta.request_id} ended early: {delta.finish}")
    return deltas


class SharedRunner:
    """A runner that outlives its engine: close() does nothing."""

    def __init__(self, runner: Runner) -> None:
        self.spec = runner.spec
        self.run = runner.run
        self.prepare_adapter = runner.prepare_adapter
        self.load_adapter = runner.load_adapter
        self.forget_adapter = runner.forget_adapter

    def close(self) -> None:
        pass


def loop_rates(model: nn.Module, rows: int) -> Rates:
    """The rates of a loop with the caches of mlx-lm, which evaluates one step while it builds the next.

    All rows have one length, so they need no BatchKVCache.
    """
    caches = make_prompt_cache(model)
    prompt = mx.random.randint(3, 250, (rows, CONTEXT))
    mx.eval(prompt)
    began = time.perf_counter()
    steady = began
    token = mx.argmax(model(prompt, cache=caches)[:, -1], axis=-1)
    mx.eval(token)
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            steady = time.perf_counter()
        following = mx.argmax(model(token[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(following)
        token.tolist()
        token = following
    mx.eval(token)
    ended = time.perf_counter()
    return Rates(rows * STEPS / (ended - steady), rows * (STEPS + WARMUP + 1) / (ended - began))


def _lengths(count: int) -> list[int]:
    return np.geomspace(64, 2048, count).astype(int).tolist()


def uneven(bench: Bench) -> Iterator[Row]:
    count = max(bench.counts)
    lengths = _lengths(count)
    mean = sum(lengths) // count
    localllm, peer = alternate(
        bench.pairs, lambda: engine_rates(bench.runner, lengths), lambda: engine_rates(bench.runner, [mean] * count)
    )
    yield bench.row(f"decode {count} rows of 64…2048 tokens, peer: all of {mean}", localllm.steady, peer.steady)


def with_adapters(bench: Bench) -> Iterator[Row]:
    count = max(bench.counts)
    adapters = []
    for number in range(ADAPTERS):
        folder = bench.folder / f"adapter-{number}"
        folder.mkdir()
        adapters.append(replace(write_adapter(bench.shape, RANK, folder), name=folder.name))
    localllm, base = alternate(
        bench.pairs,
        lambda: engine_rates(bench.runner, [CONTEXT] * count, adapters),
        lambda: engine_rates(bench.runner, [CONTEXT] * count),
    )
    label = f"{count} x {CONTEXT}, {ADAPTERS} adapters of rank {RANK}, peer: base model"
    yield bench.row(f"decode {label}", localllm.steady, base.steady)
    yield bench.row(f"prompts and decode {label}", localllm.overall, base.overall)


def first_tokens(bench: Bench, length: int, less: int) -> tuple[float, float]:
    """Seconds to the first token without a prefix hit of `length` tokens, then with a hit of `length - less` tokens."""
    rng = np.random.default_rng()
    vocab = bench.runner.spec.vocab_size
    engine = Engine(SharedRunner(bench.runner))
    shared = rng.integers(3, vocab, length).tolist()
    seconds: list[float] = []
    for common in (shared, shared[: length - less]):
        began = time.perf_counter()
        engine.submit(Request("a", (*common, *rng.integers(3, vocab, QUESTION).tolist()), 1))
        while not engine.step():
            pass
        seconds.append(time.perf_counter() - began)
        while engine.has_work:
            engine.step()
    return seconds[0], seconds[1]


def prefix(bench: Bench) -> Iterator[Row]:
    for suffix, more in (("", 0), (", of a length never met", 64)):
        pairs = [first_tokens(bench, PREFIX + pair * more, more // 2) for pair in range(bench.pairs + 1)][1:]
        cold, hit = (1e3 * statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        yield bench.row(
            f"first token after {PREFIX} tokens that were there, peer: that were not{suffix}", hit, cold, "ms"
        )


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "decode": decode,
    "uneven": uneven,
    "adapters": with_adapters,
    "prefix": prefix,
}


if __name__ == "__main__":
    main()
