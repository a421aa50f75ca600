"""An engine whose steps can be timed: it makes the steps that the daemon's thread makes."""

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

WARMUP = 4  # steps before the timed steps
FIRST_PROMPT = 4096  # tokens of the prompt whose KV fills the cache
COPIES = 8192  # pages in one step


@dataclass(frozen=True, slots=True)
class Throughput:
    """The result for many requests in parallel."""

    seconds: float
    tokens: int  # generated
    steps: int


class Watched:
    """A runner that stores the last batch and adds up the time of its calls. While `skips` is set, it does not compute
    steps with prompts.

    The time of a decode step does not depend on the numbers in the KV cache. So it is enough that `fill` has put real
    numbers everywhere: the prompts of the timed rows need not be computed.
    """

    def __init__(self, runner: Runner, *, overlap: bool = True) -> None:
        self.runner = runner
        self.spec = replace(runner.spec, overlap=runner.spec.overlap and overlap)
        self.batch: Batch | None = None
        self.skips = False
        self.seconds = 0.0  # in which the host launched steps

    def run(self, batch: Batch) -> Pending:
        self.batch = batch
        if self.skips and batch.num_tokens > batch.num_rows:
            return Skipped(batch)
        start = time.perf_counter()
        pending = self.runner.run(batch)
        self.seconds += time.perf_counter() - start
        return pending

    def prepare_adapter(self, adapter: Adapter) -> None:
        self.runner.prepare_adapter(adapter)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self.runner.load_adapter(slot, adapter)

    def forget_adapter(self, adapter: Adapter) -> None:
        self.runner.forget_adapter(adapter)

    def close(self) -> None:
        self.runner.close()

    def fill(self) -> None:
        """Copy the keys and values of the last batch's first row into every page."""
        assert self.batch is not None
        batch = self.batch
        [group] = self.spec.groups
        [table] = batch.page_tables
        computed = table[0, : int(batch.context_lens[0]) // group.page_size]
        targets = np.setdiff1d(np.arange(1, group.num_pages + 1, dtype=np.int32), table)
        pairs = np.stack([np.resize(computed, len(targets)), targets], axis=1).astype(np.int32)
        for start in range(0, len(pairs), COPIES):
            self.runner.run(replace(batch, page_copies=(pairs[start : start + COPIES],))).result()


class Skipped:
    """The result of a step that was not computed: zeros."""

    def __init__(self, batch: Batch) -> None:
        self._row_starts = batch.answer_starts

    def result(self) -> StepResult:
        return StepResult(np.zeros(self._row_starts[-1], np.int32), self._row_starts)


class Stepped:
    """One way to run a model."""

    def __init__(self, label: str, runner: Runner, *, overlap: bool = True) -> None:
        self.label = label
        self.watched = Watched(runner, overlap=overlap)
        self.engine = Engine(self.watched)
        self._random = np.random.default_rng(0)
        self._submitted = 0
        length = min(FIRST_PROMPT, self.spec.max_context - 2, self.spec.cache_tokens - 2)
        self._submit([self.prompt(length)], [2])
        self._finish()
        self.watched.fill()
        gc.collect()
        gc.freeze()  # as the worker does

    @property
    def spec(self) -> RunnerSpec:
        return self.watched.spec

    @property
    def rows(self) -> int:
        """Rows of the last step."""
        return 0 if self.watched.batch is None else self.watched.batch.num_rows

    def mean_context(self, count: int) -> float:
        """The mean context of all rows over the last `count` steps."""
        assert self.watched.batch is not None
        return float(self.watched.batch.context_lens.mean()) - (count - 1) / 2

    def prompt(self, length: int) -> tuple[int, ...]:
        """A random prompt, which has no prefix hit."""
        return tuple(self._random.integers(0, self.spec.vocab_size, length).tolist())

    def steady(self, rows: int, context: int, steps: int) -> None:
        """Make steps until `rows` requests decode in parallel. Over their next `steps` steps the mean context of the
        rows is `context` tokens."""
        self.clear()
        self.watched.skips = True
        self.watched.batch = None
        length = max(2, context - WARMUP - steps // 2)
        lead = (
            -(-rows * length // self.spec.max_tokens) + 2
        )  # steps that the first row makes before the last row begins
        prompts = [self.prompt(max(2, length - lead // 2)) for _ in range(rows)]
        self._submit(prompts, [steps + WARMUP + lead] * rows)
        while not (self.rows == rows and self.watched.batch is not None and self.watched.batch.num_tokens == rows):
            assert self.engine.has_work, f"{rows} requests of {context} tokens do not fit the cache together"
            self.engine.step()
        self.watched.skips = False
        for _ in range(WARMUP):
            self.engine.step()

    def steps(self, count: int) -> float:
        """The mean time in seconds of the next `count` steps."""
        rows = self.rows
        start = time.perf_counter()
        for _ in range(count):
            self.engine.step()
        seconds = time.perf_counter() - start
        assert self.rows == rows, "a row joined or ended during the measurement"
        return seconds / count

    def alone(self, count: int) -> float:
        """The mean time in seconds of `count` steps of the runner without the engine.

        The runner repeats the last batch. With overlap each step starts before the results of the step before are read.
        """
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
        """Seconds from the submission of a prompt of `length` tokens to its first generated token."""
        self.clear()
        prompt = self.prompt(length)
        start = time.perf_counter()
        self._submit([prompt], [1])
        while not any(delta.tokens for delta in self.engine.step()):
            pass
        return time.perf_counter() - start

    def throughput(self, prompts: Sequence[tuple[int, ...]], counts: Sequence[int], sampling: Sampling) -> Throughput:
        """Run all requests in parallel. Each generates the number of tokens in `counts`."""
        self.clear()
        before = self.engine.stats().steps
        start = time.perf_counter()
        self._submit(prompts, counts, sampling)
        tokens = self._finish()
        seconds = time.perf_counter() - start
        assert tokens == sum(counts), f"{tokens} tokens of {sum(counts)}"
        return Throughput(seconds, tokens, self.engine.stats().steps - before)

    def clear(self) -> None:
        """Cancel all requests."""
        for number in range(self._submitted):
            self.engine.cancel(str(number))
        self._finish()
        self._submitted = 0

    def close(self) -> None:
        gc.unfreeze()
        self.engine.close()

    def _submit(
        self, prompts: Sequence[tuple[int, ...]], counts: Sequence[int], sampling: Sampling = Sampling()
    ) -> None:
        for prompt, count in zip(prompts, counts, strict=True):
            self.engine.submit(Request(str(self._submitted), prompt, count, sampling))
            self._submitted += 1

    def _finish(self) -> int:
        """Make steps until no request is left. Returns the number of generated tokens."""
        tokens = 0
        while self.engine.has_work:
            tokens += sum(len(delta.tokens) for delta in self.engine.step())
        return tokens
