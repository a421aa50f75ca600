"""The runner of MLX: computes a plan with one model of mlx-lm and its caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import ReferenceType, WeakMethod, ref

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, Ints, Want
from ...engine.errors import ModelRefused, OutOfMemory, RunnerFailed
from ...engine.lora import Adapter
from ...engine.runner import RunnerSpec, StepResult
from .cache import Caches
from .failures import failures, shortages
from .loading import Loaded
from .plan import Call, Passing, Plan, Planner
from .sampler import Drawn, sample

IDLE = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class _Last:
    """Tokens of the step before, still lazy, and the first answer of each row."""

    tokens: mx.array  # [answers]
    starts: Ints  # [rows + 1]


class _Answers:
    """Logits and hidden states of a step's calls, for the rows that want an answer."""

    def __init__(self, batch: Batch) -> None:
        self._wants_hidden = bool((batch.wants == Want.HIDDEN).any())
        self._wanted = np.flatnonzero(batch.wants != Want.NOTHING).tolist()
        self._places: dict[int, int] = {}  # by row of the batch
        self._logits: list[mx.array] = []
        self._hidden: list[mx.array] = []

    def add(self, call: Call, logits: mx.array, hidden: mx.array) -> bool:
        """[rows of the call, …] each. False: no row wants an answer."""
        if set(self._wanted).isdisjoint(call.rows):
            return False
        self._places.update(zip(call.rows, count(len(self._places))))
        self._logits.append(logits)
        self._hidden.append(hidden)
        return True

    def logits(self) -> mx.array | None:
        """[answers, vocab] in the batch's order."""
        return self._ordered(self._logits) if self._wanted else None

    def hidden(self) -> mx.array | None:
        """[answers, hidden] float32, where a row wants them."""
        return self._ordered(self._hidden).astype(mx.float32) if self._wants_hidden else None

    def _ordered(self, parts: list[mx.array]) -> mx.array:
        if not self._places.keys() >= set(self._wanted):
            raise RunnerFailed("a row without pages wants an answer")
        whole = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        places = [self._places[row] for row in self._wanted]
        return whole if places == list(range(len(whole))) else whole[mx.array(places)]


class MlxPending:
    """A step that was started."""

    def __init__(
        self,
        row_starts: Ints,  # of StepResult
        drawn: Drawn | None,
        hidden: mx.array | None,
        read: Callable[[], None],  # called when somebody has read it
        ran_short: Callable[[], None],  # called on out of memory; raises where no other step may follow
    ) -> None:
        self._row_starts = row_starts
        self._drawn = drawn
        self._hidden = hidden
        self._read = read
        self._ran_short = ran_short
        self.unread = True
        self.lost = False  # with the step before, whose tokens it reads

    def result(self) -> StepResult:
        try:
            with failures(), shortages():
                if self.lost:
                    raise OutOfMemory("the step before ran out of memory")
                return self._result()
        except OutOfMemory:
            if not self.lost:
                self._ran_short()
            raise
        finally:
            self.unread = False
            self._read()

    def _result(self) -> StepResult:
        hidden = None if self._hidden is None else _values(self._hidden)
        if self._drawn is None:
            return StepResult(np.zeros(0, np.int32), self._row_starts)
        tokens = _values(self._drawn.tokens)
        chosen, top_tokens, top = (None if x is None else _values(x) for x in self._drawn.logprobs)
        return StepResult(tokens, self._row_starts, chosen, top_tokens, top, hidden)


def _values(array: mx.array) -> NDArray[Any]:
    """float32 or any integers -> float32 or int32."""
    return np.array(array).astype(np.float32 if array.dtype == mx.float32 else np.int32)


class _Rest:
    """Calls a method on a thread of its own once no step has come or ended for a while, as long as its object lives."""

    def __init__(self, seconds: float, rest: Callable[[], None]) -> None:
        self._seconds = seconds
        self._rest = WeakMethod(rest)
        self._closed = threading.Event()
        self._wanted = threading.Event()  # by a step that came since the thread last looked
        self._last = 0.0  # when the last step came or ended
        self._thread = threading.Thread(target=self._wait, name="mlx rest", daemon=True)
        self._thread.start()

    def put_off(self) -> None:
        self._last = time.monotonic()  # waking the thread for each step would cost more
        if not self._wanted.is_set():
            self._wanted.set()

    def close(self) -> None:
        self._closed.set()
        self._wanted.set()
        self._thread.join()

    def _wait(self) -> None:
        while self._wanted.wait() and not self._closed.is_set():
            self._wanted.clear()
            while (left := self._last + self._seconds - time.monotonic()) > 0 and not self._closed.wait(left):
                pass
            rest = self._rest()
            if rest is not None and not self._closed.is_set():
                rest()
            del rest


class MlxRunner:
    """See engine.runner.Runner."""

    def __init__(self, loaded: Loaded, spec: RunnerSpec, planner: Planner, caches: Caches, stream: mx.Stream) -> None:
        self._loaded = loaded
        self._spec = spec
        self._planner = planner
        self._caches = caches
        self._stream = stream
        self._computing = threading.Lock()  # the stream is for one thread at a time
        self._last: _Last | None = None
        self._started: ReferenceType[MlxPending] | None = None  # the last step; nobody may want its result
        self._wrote_pages = (False, False)  # the last step, and the step before it
        self._rest = _Rest(IDLE, self._give_back)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def run(self, batch: Batch) -> MlxPending:
        """See engine.runner.Runner."""
        self._rest.put_off()
        with failures(), self._computing, mx.stream(self._stream):
            try:
                return self._start(batch)
            except OutOfMemory as error:
                shortage = OutOfMemory(str(error))  # without the traceback, which holds arrays of the step
            self._planner.fail()
            self._caches.keep(self._planner.groups)
            self._last = None
            mx.clear_cache()
        raise shortage

    def _start(self, batch: Batch) -> MlxPending:
        plan = self._planner.plan(batch)
        self._wrote_pages = (plan.writes_pages, self._wrote_pages[0])
        tokens = self._tokens(batch)
        answers = _Answers(batch)
        self._write(plan)
        for passing in plan.passing:
            self._pass(passing, batch, tokens, answers)
        for move in plan.moves:
            self._caches.move(move)
        self._caches.keep(self._planner.groups)
        waited: list[mx.array] = []
        for call in plan.calls:
            if not answers.add(call, *self._called(call, batch, tokens)):
                waited += self._caches.groups[call.group].arrays
        logits = answers.logits()
        hidden = answers.hidden()
        drawn = None if logits is None else sample(logits, batch)
        waited += [] if drawn is None else drawn.arrays
        waited += [] if hidden is None else [hidden]
        with shortages():
            mx.async_eval(waited)
        starts = batch.answer_starts
        self._last = None if drawn is None else _Last(drawn.tokens, starts)
        pending = MlxPending(starts, drawn, hidden, self._rest.put_off, self._ran_short)
        self._started = ref(pending)
        return pending

    def _write(self, plan: Plan) -> None:
        """Write pages, before anything reads them, and free the groups that left. The step before ends first: MLX
        copies an array as a whole that is written while a step reads it."""
        with shortages():
            if plan.writes_pages:
                mx.synchronize(self._stream)
            self._caches.write(plan.writes, plan.copies)
            self._caches.pool.settle()
        self._caches.keep({*self._planner.groups, *plan.sources})

    def _pass(self, passing: Passing, batch: Batch, tokens: mx.array, answers: _Answers) -> None:
        """Read a row, compute it, and write it back."""
        group = passing.call.group
        self._caches.move(passing.move)
        logits, hidden = self._called(passing.call, batch, tokens)
        answers.add(passing.call, logits, hidden)
        with shortages():
            mx.eval(logits, hidden, self._caches.groups[group].arrays)
            mx.synchronize(self._stream)
        self._caches.write([passing.write], [])
        with shortages():
            self._caches.pool.settle()
        del self._caches.groups[group]

    def _called(self, call: Call, batch: Batch, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Logits [rows, vocab] and hidden states [rows, hidden] of each row's last token."""
        group = self._caches.groups[call.group]
        group.place()
        places = batch.row_starts[call.rows][:, None] + np.arange(call.new, dtype=np.int32)
        in_order = _in_order(places.ravel(), tokens)
        inputs = tokens.reshape(places.shape) if in_order else tokens[mx.array(places)]
        outputs = self._loaded.forward(inputs, group.layers)
        group.lengths = [length + call.new for length in group.lengths]
        return outputs

    def _tokens(self, batch: Batch) -> mx.array:
        """[tokens] of the batch, with those that the step before drew."""
        rows = np.flatnonzero(batch.carry >= 0)
        if not len(rows):
            return mx.array(batch.tokens)
        assert self._last is not None, "a row carries from a step that drew nothing"
        places = self._last.starts[batch.carry[rows]]
        drawn = self._last.tokens
        drawn = drawn if _in_order(places, drawn) else drawn[mx.array(places)]
        if len(rows) == batch.num_tokens:
            return drawn
        tokens = mx.array(batch.tokens)
        tokens[mx.array(batch.row_starts[1:][rows] - 1)] = drawn
        return tokens

    def _ran_short(self) -> None:
        """Two started steps failed. Positions that only their groups have are lost, and the engine ends the requests of
        both. Other requests may read the pages that these steps should have written; then no step may follow."""
        if any(self._wrote_pages):
            raise RunnerFailed("memory ran out while pages were written")
        with self._computing, mx.stream(self._stream):
            started = None if self._started is None else self._started()
            if started is not None:
                started.lost = True
            self._planner.fail_all()
            self._caches.keep(self._planner.groups)
            self._last = None
        mx.clear_cache()

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        raise ModelRefused(f"adapter {adapter.name}: this version loads no adapters")

    def close(self) -> None:
        """Free the memory: the runner computes no more."""
        self._rest.close()
        del self._loaded, self._planner, self._caches, self._last

    def _give_back(self) -> None:
        """Free the groups, and the memory that MLX caches."""
        with self._computing, mx.stream(self._stream):
            started = None if self._started is None else self._started()
            if started is not None and started.unread:  # a long step is no rest
                self._rest.put_off()
                return
            try:
                self._caches.write(self._planner.release_all().writes, [])
                self._caches.keep(())
                self._caches.pool.settle()
            except (RuntimeError, MemoryError):
                pass  # the writes stay lazy, and the next step computes them
        mx.clear_cache()


def _in_order(places: NDArray[Any], array: mx.array) -> bool:
    """The places are all of `array`, first to last: nothing is to be gathered."""
    return len(places) == len(array) and bool((places == np.arange(len(places))).all())
