"""A runner without a model. Where KV would be it stores the token itself, with position and adapter, and it answers
with a hash of everything the page table leads to: a wrong page, position, adapter, order or stale copy changes the
output. Touchy on purpose: what no runner may be asked raises AssertionError.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from localllm.engine.batch import Batch, Want
from localllm.engine.engine import Engine
from localllm.engine.lora import Adapter
from localllm.engine.request import Delta, Request
from localllm.engine.runner import CacheGroup, RunnerSpec, StepResult
from localllm.engine.sampling import mix, sample

SPEC = RunnerSpec(vocab_size=96, max_tokens=32, max_rows=8, max_context=256, groups=(CacheGroup(4, 128),))


def logits_of(tokens: np.ndarray, positions: np.ndarray, adapters: np.ndarray, vocab: int) -> np.ndarray:
    """[vocab] logits that depend on each token of the context, its position, adapter and place."""
    cells = np.stack([tokens, positions, adapters, np.arange(len(tokens))]).astype(np.uint32)
    h = np.zeros(len(tokens), np.uint32)
    for column in cells:
        h = mix((h ^ column) + np.uint32(0x9E3779B9))
    h = mix(h.sum(dtype=np.uint32, keepdims=True) ^ np.arange(vocab, dtype=np.uint32))
    return (h >> 8).astype(np.float32) / 2**21 - 4


@dataclass
class Step:
    """A launched step; with `lazy`, nothing happens before a result is asked for."""

    device: TokenDevice
    batch: Batch
    answer: StepResult | None = None

    def result(self) -> StepResult:
        self.device.log.append("result")
        self.device.compute_until(self)
        assert self.answer is not None
        return self.answer


@dataclass
class TokenDevice:
    """Implements engine.runner.Runner. Steps take effect in the order of run()."""

    spec: RunnerSpec
    lazy: bool = True
    fail_at: int = -1  # number of the step whose result raises
    log: list[str] = field(default_factory=list)  # "run" and "result", in order
    batches: list[Batch] = field(default_factory=list)
    loads: list[tuple[int, Adapter]] = field(default_factory=list)
    broken_adapter: str = ""
    closed: bool = False

    def __post_init__(self) -> None:
        spec = self.spec
        caches, length = (spec.num_states, spec.max_context)
        if spec.groups:
            caches, length = spec.groups[0].num_pages + 1, spec.groups[0].page_size
        self.cells = np.full((caches, length, 3), -1, np.int64)  # token, position, adapter of what is stored
        self.adapter_ids = np.zeros(spec.num_adapters + 1, np.int64)
        self.queue: deque[Step | Callable[[], None]] = deque()
        self.last: StepResult | None = None

    def run(self, batch: Batch) -> Step:
        self.check(batch)
        self.log.append("run")
        self.batches.append(batch)
        step = Step(self, batch)
        self.queue.append(step)
        if not self.lazy:
            self.compute_until(step)
        return step

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        from localllm.engine.errors import ModelRefused

        if adapter.name == self.broken_adapter:
            raise ModelRefused(f"{adapter.path} does not fit")
        self.loads.append((slot, adapter))
        identity = zlib.crc32(f"{adapter.name}@{adapter.version}".encode())
        self.queue.append(lambda: self.adapter_ids.__setitem__(slot, identity))

    def close(self) -> None:
        assert not self.closed
        self.closed = True

    def check(self, batch: Batch) -> None:
        """What the seam promises of every batch."""
        spec, counts = self.spec, np.diff(batch.row_starts)
        assert not self.closed
        assert 0 < batch.num_rows <= spec.max_rows
        assert 0 < batch.num_tokens <= spec.max_tokens
        assert batch.row_starts[0] == 0
        assert batch.row_starts[-1] == len(batch.tokens) == len(batch.positions)
        assert (counts > 0).all()
        assert ((batch.tokens >= 0) & (batch.tokens < spec.vocab_size)).all()
        assert batch.context_lens.max() <= spec.max_context
        assert len(set(batch.adapters.tolist()) - {0}) <= spec.adapters_per_step
        for row, (start, end) in enumerate(zip(batch.row_starts[:-1], batch.row_starts[1:], strict=True)):
            assert (np.diff(batch.positions[start:end]) == 1).all()
            assert batch.carry[row] < 0 or batch.tokens[end - 1] == 0
            assert 0 <= batch.drafts[row] <= min(spec.max_drafts, end - start - 1)
            assert not batch.drafts[row] or (batch.carry[row] < 0 and batch.wants[row] == Want.TOKEN)
        for array in (batch.states, batch.carry, batch.wants, batch.drafts, batch.adapter_scales):
            assert len(array) == batch.num_rows
        assert all(len(getattr(batch.sampling, name)) == batch.answer_starts[-1] for name in PER_ANSWER)
        for copies in batch.page_copies:
            assert len(set(copies[:, 1].tolist())) == len(copies)
        if spec.groups:
            [group], [table] = spec.groups, batch.page_tables
            assert (batch.states == -1).all()
            assert table.max() <= group.num_pages
            assert all(
                (table[row, : -(-length // group.page_size)] > 0).all() for row, length in enumerate(batch.context_lens)
            )
        else:
            assert len(set(batch.states.tolist())) == batch.num_rows
            assert batch.states.min() >= 0

    def compute_until(self, step: Step) -> None:
        while step.answer is None:
            job = self.queue.popleft()
            if isinstance(job, Step):
                job.answer = self.last = self.compute(job.batch)
            else:
                job()

    def compute(self, batch: Batch) -> StepResult:
        if self.fail_at == 0:
            raise RuntimeError("the device is on fire")
        self.fail_at -= 1
        rows, size = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_starts)), self.cells.shape[1]
        tokens = batch.tokens.copy()
        carried = batch.carry >= 0
        if carried.any():
            assert self.last is not None
            tokens[batch.row_starts[1:][carried] - 1] = self.last.tokens[self.last.row_starts[batch.carry[carried]]]
        for copies in batch.page_copies:
            self.cells[copies[:, 1]] = self.cells[copies[:, 0]]
        places = self.places(batch)
        at = places[rows, batch.positions // size], batch.positions % size
        real = at[0] != 0 if self.spec.groups else np.ones(len(tokens), bool)
        assert len(set(zip(at[0][real].tolist(), at[1][real].tolist(), strict=True))) == real.sum(), "written twice"
        self.cells[at] = np.stack([tokens, batch.positions, self.adapter_ids[batch.adapters][rows]], axis=-1)
        logits = np.zeros((len(batch.answer_tokens), self.spec.vocab_size), np.float32)
        for answer, token in enumerate(batch.answer_tokens):
            seen = self.cells[places[rows[token]]].reshape(-1, 3)[: batch.positions[token] + 1]
            logits[answer] = logits_of(*seen.T, self.spec.vocab_size)
        return sample(logits, batch)

    def places(self, batch: Batch) -> np.ndarray:
        """[rows, …] first index into the cells, for each page or for the one slot."""
        return batch.page_tables[0] if self.spec.groups else batch.states[:, None]


PER_ANSWER = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "draw",
    "logprobs",
)


def finish_all(engine: Engine, steps: int = 100_000) -> list[Delta]:
    """Step until nothing is left to do; every delta in order."""
    deltas: list[Delta] = []
    for _ in range(steps):
        if not engine.has_work:
            return deltas
        deltas += engine.step()
    raise AssertionError("the engine does not come to an end")


def outputs(deltas: list[Delta]) -> dict[str, tuple[int, ...]]:
    """Tokens of each request."""
    tokens: dict[str, tuple[int, ...]] = {}
    for delta in deltas:
        tokens[delta.request_id] = tokens.get(delta.request_id, ()) + delta.tokens
    return tokens


def with_pages(spec: RunnerSpec, num_pages: int, page_size: int = 4) -> RunnerSpec:
    """The spec with one cache group of this size."""
    return replace(spec, groups=(CacheGroup(page_size, num_pages),))


def solo(request: Request, spec: RunnerSpec = SPEC) -> tuple[int, ...]:
    """What the request gives alone, in one go, with plenty of room: what it must give in any company."""
    roomy = replace(spec, max_tokens=4096, groups=(CacheGroup(4, 1024),), num_states=0, overlap=False)
    engine = Engine(TokenDevice(roomy))
    if request.adapter is not None:
        engine.register_adapter(request.adapter)
    engine.submit(request)
    return outputs(finish_all(engine))[request.id]
