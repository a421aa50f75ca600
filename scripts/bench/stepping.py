"""A runner under an engine, stepped by hand as the daemon's thread steps it, so that its steps can be timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from localllm.engine.batch import Batch
from localllm.engine.engine import Engine
from localllm.engine.lora import Adapter
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import Pending, Runner, RunnerSpec, StepResult

WARM = 4  # steps before timed ones
PRIMED = 4096  # tokens that are computed to have numbers in the cache
COPIES = 8192  # pages at a time


@dataclass(frozen=True, slots=True)
class Throughput:
    """Of many requests at once."""

    seconds: float
    tokens: int  # that were generated
    steps: int


class Watched:
    """The same runner; remembers the last batch, and passes over steps that read prompts while `skips` is set.

    What a step of many rows takes does not depend on which numbers their cache holds: so a long context need not be
    computed for every row before its steps can be timed. `fill` has put real numbers everywhere.
    """

    def __init__(self, runner: Runner, *, overlap: bool = True) -> None:
        self.runner, self.spec = runner, replace(runner.spec, overlap=runner.spec.overlap and overlap)
        self.batch: Batch | None = None
        self.skips = False

    def run(self, batch: Batch) -> Pending:
        self.batch = batch
        return Skipped(batch) if self.skips and batch.num_tokens > batch.num_rows else self.runner.run(batch)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self.runner.load_adapter(slot, adapter)

    def close(self) -> None:
        self.runner.close()

    def fill(self) -> None:
        """Put keys and values into every page, those that the last batch's first row has computed."""
        assert self.batch is not None
        [group], batch = self.spec.groups, self.batch
        [table] = batch.page_tables
        computed = table[0, : int(batch.context_lens[0]) // group.page_size]
        targets = np.setdiff1d(np.arange(1, group.num_pages + 1, dtype=np.int32), table)
        pairs = np.stack([np.resize(computed, len(targets)), targets], axis=1).astype(np.int32)
        for start in range(0, len(pairs), COPIES):
            self.runner.run(replace(batch, page_copies=(pairs[start : start + COPIES],))).result()


class Skipped:
    """A step that was not computed."""

    def __init__(self, batch: Batch) -> None:
        self._row_starts = batch.answer_starts

    def result(self) -> StepResult:
        return StepResult(np.zeros(self._row_starts[-1], np.int32), self._row_starts)


class Stepped:
    """One way to run a model."""

    def __init__(self, label: str, runner: Runner, *, overlap: bool = True) -> None:
        self.label, self.watched = label, Watched(runner, overlap=overlap)
        self.engine = Engine(self.watched)
        self._random = np.random.default_rng(0)
        self._asked = 0
        length = min(PRIMED, self.spec.max_context - 2, self.spec.cache_tokens - 2)
        self._ask([self.prompt(length)], [2])
        self._finish()
        self.watched.fill()
        gc.collect()
        gc.freeze()  # as the worker does

    @property
    def spec(self) -> RunnerSpec:
        return self.watched.spec

    @property
    def rows(self) -> int:
        """Of the last step."""
        return 0 if self.watched.batch is None else self.watched.batch.num_rows

    def mean_context(self, count: int) -> float:
        """Of all rows, over the last `count` steps."""
        assert self.watched.batch is not None
        return float(self.watched.batch.context_lens.mean()) - (count - 1) / 2

    def prompt(self, length: int) -> tuple[int, ...]:
        """Random, so that the prefix cache has nothing to give."""
        return tuple(self._random.integers(0, self.spec.vocab_size, length).tolist())

    def steady(self, rows: int, context: int, steps: int) -> None:
        """Until `rows` requests decode side by side, with so many steps before them: on average of these steps and of
        the requests, `context` tokens each."""
        self.clear()
        self.watched.skips, self.watched.batch = True, None  # the last batch is of others
        length = max(2, context - WARM - steps // 2)
        lead = -(-rows * length // self.spec.max_tokens) + 2  # steps that the first has made before the last
        prompts = [self.prompt(max(2, length - lead // 2)) for _ in range(rows)]
        self._ask(prompts, [steps + WARM + lead] * rows)
        while not (self.rows == rows and self.watched.batch is not None and self.watched.batch.num_tokens == rows):
            assert self.engine.has_work, f"{rows} requests of {context} tokens do not fit the cache together"
            self.engine.step()
        self.watched.skips = False
        for _ in range(WARM):
            self.engine.step()

    def steps(self, count: int) -> float:
        """Seconds of one step, of `count` that follow each other as in the daemon."""
        rows = self.rows
        start = time.perf_counter()
        for _ in range(count):
            self.engine.step()
        seconds = time.perf_counter() - start
        assert self.rows == rows, "all rows have decoded all the time"
        return seconds / count

    def alone(self, count: int) -> float:
        """Seconds of one step without an engine: the last batch again and again, the next started before the answers
        of the one before are asked for, where the runner can."""
        assert self.watched.batch is not None
        batch = self.watched.batch
        if self.spec.overlap:
            batch = replace(batch, carry=np.arange(batch.num_rows, dtype=np.int32))
        run = self.watched.runner.run
        run(batch).result()
        start = time.perf_counter()
        pending = None
        for _ in range(count):
            started = run(batch)
            if not self.spec.overlap:
                started.result()
            elif pending is not None:
                pending.result()
            pending = started
        if self.spec.overlap and pending is not None:
            pending.result()
        return (time.perf_counter() - start) / count

    def first_token(self, length: int) -> float:
        """Seconds from asking, with a prompt of `length` tokens, to the first one generated."""
        self.clear()
        prompt = self.prompt(length)
        start = time.perf_counter()
        self._ask([prompt], [1])
        while not any(delta.tokens for delta in self.engine.step()):
            pass
        return time.perf_counter() - start

    def throughput(self, prompts: Sequence[tuple[int, ...]], counts: Sequence[int], sampling: Sampling) -> Throughput:
        """All asked for at once; every one is to give exactly its count of tokens."""
        self.clear()
        before = self.engine.stats().steps
        start = time.perf_counter()
        self._ask(prompts, counts, sampling)
        tokens = self._finish()
        seconds = time.perf_counter() - start
        assert tokens == sum(counts), f"{tokens} tokens of {sum(counts)}"
        return Throughput(seconds, tokens, self.engine.stats().steps - before)

    def clear(self) -> None:
        """End what is under way."""
        for number in range(self._asked):
            self.engine.cancel(str(number))
        self._finish()
        self._asked = 0

    def close(self) -> None:
        gc.unfreeze()
        self.engine.close()

    def _ask(self, prompts: Sequence[tuple[int, ...]], counts: Sequence[int], sampling: Sampling = Sampling()) -> None:
        for prompt, count in zip(prompts, counts, strict=True):
            self.engine.submit(Request(str(self._asked), prompt, count, sampling))
            self._asked += 1

    def _finish(self) -> int:
        """Steps until nothing is left; how many tokens came."""
        tokens = 0
        while self.engine.has_work:
            tokens += sum(len(delta.tokens) for delta in self.engine.step())
        return tokens
