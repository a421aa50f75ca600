"""A runner without a model.

In place of KV it stores the token itself, with position and adapter; its recurrent state is a running hash of the
tokens. It answers with a hash of the state and of everything that the page tables lead to: a wrong page, position,
adapter, order, state or stale copy changes the output. Touchy on purpose: a batch that breaks the seam's rules raises
AssertionError.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from localllm.engine.batch import Batch, Want
from localllm.engine.engine import Engine
from localllm.engine.errors import RunnerFailed
from localllm.engine.lora import Adapter
from localllm.engine.request import Delta, Request
from localllm.engine.runner import CacheGroup, RunnerSpec, StepResult
from localllm.engine.sampling import mix, sample

SPEC = RunnerSpec(
    vocab_size=96, max_tokens=32, max_rows=8, max_context=256, groups=(CacheGroup(4, 128),), hidden_size=4
)


GOLDEN = np.uint32(0x9E3779B9)


def digest(tokens: np.ndarray, positions: np.ndarray, adapters: np.ndarray, first: int = 0) -> np.ndarray:
    """[1] hash of the cells of positions first…, that depends on each token, its position, adapter and place."""
    cells = np.stack([tokens, positions, adapters, np.arange(first, first + len(tokens))]).astype(np.uint32)
    h = np.zeros(len(tokens), np.uint32)
    for column in cells:
        h = mix((h ^ column) + GOLDEN)
    return h.sum(dtype=np.uint32, keepdims=True)


def next_state(state: np.ndarray, token: int, adapter: int) -> np.ndarray:
    """[1] the state after one more token."""
    for word in (token, adapter & 0xFFFFFFFF):
        state = mix((state ^ np.uint32(word)) + GOLDEN)
    return state


def logits_of(digests: list[np.ndarray], vocab: int) -> np.ndarray:
    """[vocab] logits that depend on each digest; of one alone, and not mixed again."""
    h = digests[0]
    for more in digests[1:]:
        h = mix(h + GOLDEN) ^ more
    h = mix(h ^ np.arange(vocab, dtype=np.uint32))
    return (h >> 8).astype(np.float32) / 2**21 - 4


@dataclass
class Step:
    """A launched step; with `lazy`, nothing happens before a result is asked for."""

    device: TokenDevice
    batch: Batch
    computed: StepResult | None = None

    def result(self) -> StepResult:
        self.device.log.append("result")
        self.device.compute_until(self)
        assert self.computed is not None
        return self.computed


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
        # per group [pages, offset, 3]: token, position, adapter
        self.cells = [np.full((group.num_pages + 1, group.page_size, 3), -1, np.int64) for group in spec.groups]
        states = spec.num_states + spec.num_snapshots
        self.states = np.full(states, 77, np.uint32)
        self.state_ends = np.full(states, -1)  # position after the last one in each state
        self.adapter_ids = np.zeros(spec.num_adapters + 1, np.int64)
        self.prepared: set[Adapter] = set()
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

    def prepare_adapter(self, adapter: Adapter) -> None:
        self.prepared.add(adapter)

    def forget_adapter(self, adapter: Adapter) -> None:
        self.prepared.discard(adapter)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        from localllm.engine.errors import ModelRefused

        if adapter.name == self.broken_adapter:
            raise ModelRefused(f"{adapter.path} does not fit")
        assert adapter in self.prepared
        started = [job for job in tuple(self.queue) if isinstance(job, Step)]
        assert all(slot not in step.batch.adapters for step in started), "a step that is not computed reads this slot"
        self.loads.append((slot, adapter))
        self.adapter_ids[slot] = zlib.crc32(f"{adapter.name}@{adapter.version}".encode())

    def close(self) -> None:
        assert not self.closed
        self.closed = True

    def check(self, batch: Batch) -> None:
        """Check the properties that every Batch has (see Batch)."""
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
        assert all(len(getattr(batch.sampling, name)) == batch.sample_starts[-1] for name in PER_SAMPLE)
        for copies in (*batch.page_copies, batch.state_copies):
            assert len(set(copies[:, 1].tolist())) == len(copies)
        assert ((batch.adapter_scales == 1) | (batch.adapters > 0)).all()
        assert len(batch.page_tables) == len(batch.page_copies) == len(spec.groups)
        for group, table in zip(spec.groups, batch.page_tables, strict=True):
            assert table.min() >= 0
            assert table.max() <= group.num_pages
            for row, end in enumerate(batch.context_lens):
                first = batch.positions[batch.row_starts[row]] - group.window + 1 if group.window else 0
                assert (table[row, max(first, 0) // group.page_size : -(-end // group.page_size)] > 0).all()
        if spec.num_states:
            assert len(set(batch.states.tolist())) == batch.num_rows
            assert 0 <= batch.states.min() <= batch.states.max() < spec.num_states
            assert not batch.drafts.any()
        else:
            assert (batch.states == -1).all()

    def compute_until(self, step: Step) -> None:
        while step.computed is None:
            job = self.queue.popleft()
            if isinstance(job, Step):
                job.computed = self.last = self.compute(job.batch)
            else:
                job()

    def compute(self, batch: Batch) -> StepResult:
        if self.fail_at == 0:
            raise RuntimeError("the device is on fire")
        self.fail_at -= 1
        rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_starts))
        tokens = batch.tokens.copy()
        carried = batch.carry >= 0
        if carried.any():
            assert self.last is not None
            tokens[batch.row_starts[1:][carried] - 1] = self.last.tokens[self.last.row_starts[batch.carry[carried]]]
        scales = batch.adapter_scales.view(np.uint32) * (batch.adapters > 0)
        adapters = (self.adapter_ids[batch.adapters] ^ scales)[rows]
        self.write(batch, np.stack([tokens, batch.positions, adapters], axis=-1))
        states = self.run_states(batch, tokens, adapters)
        logits = np.zeros((len(batch.sample_tokens), self.spec.vocab_size), np.float32)
        for index, token in enumerate(batch.sample_tokens.tolist()):
            digests = self.digests(batch, int(rows[token]), int(batch.positions[token]))
            logits[index] = logits_of(digests + states[token : token + 1], self.spec.vocab_size)
        result = sample(logits, batch)
        if Want.HIDDEN not in batch.wants:
            return result
        counts = np.diff(result.row_starts)  # samples after a rejected draft have no result
        samples = np.arange(counts.sum()) + np.repeat(batch.sample_starts[:-1] - result.row_starts[:-1], counts)
        return replace(result, hidden=logits[samples, : self.spec.hidden_size])

    def write(self, batch: Batch, cells: np.ndarray) -> None:
        """Copy pages, then put the cells [tokens, 3] of the batch's tokens into all groups."""
        rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_starts))
        for stored, table, copies in zip(self.cells, batch.page_tables, batch.page_copies, strict=True):
            stored[copies[:, 1]] = stored[copies[:, 0]]
            size = stored.shape[1]
            at = table[rows, batch.positions // size], batch.positions % size
            assert len(set(zip(at[0].tolist(), at[1].tolist(), strict=True))) == len(rows), "written twice"
            stored[at] = cells

    def run_states(self, batch: Batch, tokens: np.ndarray, adapters: np.ndarray) -> list[np.ndarray]:
        """Copy states, then run each row's over its tokens; the states after all tokens, none without states."""
        sources, targets = batch.state_copies.T
        self.states[targets], self.state_ends[targets] = self.states[sources], self.state_ends[sources]
        after: list[np.ndarray] = []
        for row, slot in enumerate(batch.states.tolist() if self.spec.num_states else []):
            start, end = batch.row_starts[row : row + 2]
            first = batch.positions[start]
            assert first == 0 or self.state_ends[slot] == first, "this is the state after another position"
            state = self.states[slot : slot + 1] if first else np.zeros(1, np.uint32)
            for token, adapter in zip(tokens[start:end].tolist(), adapters[start:end].tolist(), strict=True):
                state = next_state(state, token, adapter)
                after.append(state)
            self.states[slot], self.state_ends[slot] = state[0], batch.context_lens[row]
        return after

    def digests(self, batch: Batch, row: int, position: int) -> list[np.ndarray]:
        """Per group: the hash of the cells that a position reads."""
        found = []
        for group, stored, table in zip(self.spec.groups, self.cells, batch.page_tables, strict=True):
            first = max(position - group.window + 1, 0) if group.window else 0
            seen = np.arange(first, position + 1)
            found.append(digest(*stored[table[row, seen // group.page_size], seen % group.page_size].T, first))
        return found


PER_SAMPLE = (
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
    """Tokens of each request, or the values of its hidden state."""
    tokens: dict[str, tuple[int, ...]] = {}
    for delta in deltas:
        hidden = () if delta.hidden is None else tuple(delta.hidden.tolist())
        tokens[delta.request_id] = tokens.get(delta.request_id, ()) + delta.tokens + hidden
    return tokens


def solo(request: Request, spec: RunnerSpec = SPEC) -> tuple[int, ...]:
    """The output of a request alone, with one prefill and enough memory. In any batch the output must be equal."""
    groups = tuple([replace(group, num_pages=4096 // group.page_size) for group in spec.groups])
    roomy = replace(spec, max_tokens=4096, groups=groups, num_snapshots=0, max_drafts=0, overlap=False)
    engine = Engine(TokenDevice(roomy))
    if request.adapter is not None:
        engine.register_adapter(request.adapter)
    engine.submit(request)
    return outputs(finish_all(engine))[request.id]


@dataclass
class App:
    """Collects the deltas and failures of the engine. `wait` returns when enough requests have ended."""

    deltas: list[Delta] = field(default_factory=list)
    failures: list[RunnerFailed] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def on_deltas(self, deltas: list[Delta]) -> None:
        with self.changed:
            self.threads.add(threading.current_thread().name)
            self.deltas += deltas
            self.calls.append(len(deltas))
            self.changed.notify_all()

    def on_failure(self, failure: RunnerFailed) -> None:
        with self.changed:
            self.threads.add(threading.current_thread().name)
            self.failures.append(failure)
            self.changed.notify_all()

    def ended(self) -> int:
        return sum(delta.finish is not None for delta in self.deltas)

    def wait(self, ended: int = 0, deltas: int = 0, failures: int = 0) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.ended() >= ended and len(self.deltas) >= deltas and len(self.failures) >= failures, 30
            )


def start(device: TokenDevice) -> tuple[Engine, App]:
    app = App()
    engine = Engine(device, app.on_deltas, app.on_failure)
    engine.start()
    return engine, app
