"""The runner of MLX: one model of mlx-lm, its caches, and the steps of our engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakMethod, ref

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, Ints, Want
from ...engine.errors import ModelRefused, OutOfMemory, RunnerFailed
from ...engine.lora import Adapter
from ...engine.runner import RunnerSpec, StepResult
from . import caches
from .caches import DECODES, Forward, Group, LayerCache
from .failures import failures, shortages
from .few import FewCalls
from .loading import Loaded
from .residents import Residents
from .sampler import Drawn, sample
from .work import Work

IDLE = 5.0  # seconds
PROMPT = 128  # tokens, of the one that warms


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The step before: its tokens, still lazy, and where each row's is (-1: it has none)."""

    tokens: mx.array
    place: NDArray[np.intp]


class _Called(NamedTuple):
    """A call of the model: a step that goes on with the same rows takes its caches again."""

    work: Work
    forward: Forward
    layers: list[LayerCache]


class MlxPending:
    """A step on its way."""

    def __init__(
        self,
        row_starts: Ints,  # of StepResult
        drawn: Drawn | None,
        hidden: mx.array | None,
        told: Callable[[], None],  # that somebody has read it
        ran_short: Callable[[], None],  # of memory, which only its answers told; raises where that cannot be mended
    ) -> None:
        self._row_starts, self._drawn, self._hidden = row_starts, drawn, hidden
        self._told, self._ran_short, self.unread = told, ran_short, True
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
            self._told()

    def _result(self) -> StepResult:
        if self._drawn is None:
            return StepResult(np.zeros(0, np.int32), self._row_starts)
        drawn = self._drawn
        if drawn.chosen is None or drawn.top_tokens is None or drawn.top is None:
            return StepResult(_values(drawn.tokens), self._row_starts, hidden=self._optional(self._hidden))
        return StepResult(
            _values(drawn.tokens),
            self._row_starts,
            _values(drawn.chosen),
            _values(drawn.top_tokens),
            _values(drawn.top),
            self._optional(self._hidden),
        )

    def _optional(self, found: mx.array | None) -> NDArray[Any] | None:
        return None if found is None else _values(found)


def _values(array: mx.array) -> NDArray[Any]:
    """float32 or any integers -> float32 or int32."""
    return np.array(array).astype(np.float32 if array.dtype == mx.float32 else np.int32)


class _Rest:
    """Calls a method on a thread of its own once no step has come or ended for a while, as long as its object lives."""

    def __init__(self, seconds: float, rest: Callable[[], None]) -> None:
        self._seconds, self._rest = seconds, WeakMethod(rest)
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

    def __init__(self, loaded: Loaded, spec: RunnerSpec, residents: Residents, stream: mx.Stream) -> None:
        self._loaded, self._spec, self._residents, self._stream = loaded, spec, residents, stream
        self._few = FewCalls(loaded.model, loaded.trunk, loaded.shapes)
        self._computing = threading.Lock()  # the stream is for one thread at a time
        self._last: _Drawn | None = None
        self._before: _Called | None = None
        self._started: ReferenceType[MlxPending] | None = None  # the last step; nobody may care for its result
        self._wrote_pages = False, False  # the last step, and that before it
        self._rest = _Rest(IDLE, self._give_back)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def warm(self) -> None:
        """Make the calls that most steps make, on caches of their own. CUDA compiles a kernel when it is first met on a
        machine: a second each, which a first answer would wait for, as it does where there is no memory for this."""
        prompt, several = min(PROMPT, self._spec.max_context // 2), min(caches.FEW, self._spec.max_rows)
        with suppress(OutOfMemory), failures(), shortages(), self._computing, mx.stream(self._stream):
            try:
                self._warm(prompt, several)
            finally:
                self._before = None
                mx.clear_cache()  # of caches that only those calls had

    def _warm(self, prompt: int, several: int) -> None:
        """The calls for a prompt of so many tokens, then for steps of one row and of up to `several`."""
        alone = self._warmed(Group.empty(self._loaded.shapes, 2 * PROMPT), prompt)
        self._warmed(alone, min(caches.FEW, prompt))  # behind others: more than one warp answers each
        others = [Group.empty(self._loaded.shapes, 2, rows) for rows in {min(2, several), several}]
        for group in (alone, *others):
            self._warmed(group, 1)
            self._warmed(group, 1, self._loaded.turns_late)

    def _warmed(self, group: Group, new: int, in_place: bool = False) -> Group:
        rows = len(group.padding)
        logits, _ = self._called(Work([*range(rows)], [group], [new], new), mx.zeros((rows, new), mx.int32), in_place)
        mx.eval(logits.argmax(axis=-1), group.keys, group.values)
        return group

    def run(self, batch: Batch) -> MlxPending:
        self._rest.put_off()
        with failures(), self._computing, mx.stream(self._stream):
            try:
                return self._start(batch)
            except OutOfMemory as error:
                shortage = OutOfMemory(str(error))  # whose traceback does not hold what the step computed
            last, before = self._wrote_pages
            self._wrote_pages = last or self._residents.pool.changed, before  # made from what that computes
            self._residents.give_up()
            self._last = self._before = None
            mx.clear_cache()
        raise shortage

    def _start(self, batch: Batch) -> MlxPending:
        steady = self._residents.goes_on(batch)
        hidden: mx.array | None = None
        if steady is not None and self._last is not None and steady.draws_on(batch):
            answers = place = steady.answers
            tokens = self._last.tokens[:, None]
            logits: mx.array | None = self._called(steady.work, tokens, self._loaded.turns_late)[0]
        else:
            answers = np.flatnonzero(batch.wants != Want.NOTHING)
            place = np.full(batch.num_rows, -1)
            place[answers] = np.arange(len(answers))
            works = self._residents.begin(batch) if steady is None else [steady.work]
            logits, hidden = self._compute(batch, answers, works)
        self._wrote_pages = self._residents.pool.changed, self._wrote_pages[0]
        in_place = self._before is not None and self._before.forward.in_place and not self._wrote_pages[0]
        drawn = None if logits is None else sample(logits, batch)
        waited = [*self._residents.take_changed(), *(() if drawn is None else drawn.arrays)]
        hidden = None if hidden is None else hidden.astype(mx.float32)
        waited += () if hidden is None else (hidden,)
        with shortages():
            if (DECODES or self._loaded.turns_late) and not in_place:
                # MLX writes into no array that a running step reads: each layer's whole cache, or all pages, would be
                # copied. The GPU is done by now, or soon: on CUDA starting a step takes longer than computing it. And
                # of what a step wrote in place MLX knows nothing: whoever copies it must not begin before.
                if self._last is not None:
                    mx.eval(self._last.tokens)
                elif self._wrote_pages[0]:  # a prompt's part drew nothing: to copy its cache is shorter than to wait
                    mx.synchronize(self._stream)
            mx.async_eval(waited)
        self._last = None if drawn is None else _Drawn(drawn.tokens, place)
        pending = MlxPending(batch.answer_starts, drawn, hidden, self._rest.put_off, self._ran_short)
        self._started = ref(pending)
        return pending

    def _compute(
        self, batch: Batch, answers: NDArray[np.intp], works: Iterable[Work]
    ) -> tuple[mx.array | None, mx.array | None]:
        """(logits [answers, vocab], hidden states where a row wants them), in the model's dtype"""
        tokens, wanted = self._tokens(batch), set(answers.tolist())
        order: list[int] = []
        logits: list[mx.array] = []
        hidden: list[mx.array] = []
        for work in works:
            places = _places(work, batch)
            own = tokens.reshape(places.shape) if _in_order(places.ravel(), tokens) else tokens[mx.array(places)]
            found, states = self._called(work, own)
            if work.passing:
                with shortages():
                    mx.eval(found, states)
                    mx.synchronize(self._stream)  # until then a GPU's step may keep the pages it read: see _start
            kept = [at for at, row in enumerate(work.rows) if row in wanted]
            self._residents.written(work, computed=bool(kept))
            if kept:
                if len(kept) < len(work.rows):
                    found, states = found[mx.array(kept)], states[mx.array(kept)]
                order += [work.rows[at] for at in kept]
                logits.append(found)
                hidden.append(states)
        if not wanted:
            return None, None
        states_wanted = bool((batch.wants == Want.HIDDEN).any())
        return self._sorted(logits, order, answers), self._sorted(hidden, order, answers) if states_wanted else None

    def _called(self, work: Work, tokens: mx.array, in_place: bool = False) -> tuple[mx.array, mx.array]:
        """See Trunk.call; few tokens by FewCalls, one of each row with the last step's caches, where this one goes on
        with the same rows. `in_place`: this call is all of its step, all that it computes is asked for, and the one
        before had the same rows: see Forward."""
        if self._loaded.turns_late and caches.few(work.filled, self._loaded.shapes):
            self._before = None
            return self._few.call(work.groups, work.new, tokens)
        call = self._before
        if call is None or work is not call.work or not call.forward.again(call.layers, in_place):
            forward = Forward(work.groups, work.filled, self._loaded.shapes, in_place)
            self._before = call = _Called(work, forward, forward.layers())
        found = self._loaded.trunk.call(self._loaded.model, tokens, call.layers, _last(work))
        call.forward.finish(work.new)
        return found

    def _tokens(self, batch: Batch) -> mx.array:
        """[tokens], those that the step before drew in their places."""
        rows = np.flatnonzero(batch.carry >= 0)
        if not len(rows):
            return mx.array(batch.tokens)
        assert self._last is not None, "a row carries from a step that drew nothing"
        places, drawn = self._last.place[batch.carry[rows]], self._last.tokens
        drawn = drawn if _in_order(places, drawn) else drawn[mx.array(places)]
        if len(rows) == batch.num_tokens:
            return drawn
        tokens = mx.array(batch.tokens)
        tokens[mx.array(batch.row_starts[1:][rows] - 1)] = drawn
        return tokens

    @staticmethod
    def _sorted(parts: list[mx.array], order: list[int], answers: NDArray[np.intp]) -> mx.array:
        """One array of all calls' rows, in the order of `answers`."""
        found = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        by_row = np.argsort(np.array(order))
        if len(order) != len(answers):  # inert rows have none
            raise RunnerFailed("a row without pages asks for an answer")
        return found if (by_row[1:] > by_row[:-1]).all() else found[mx.array(by_row)]

    def _ran_short(self) -> None:
        """A step was started and not computed, nor was one after it: what only groups hold is lost, and the engine ends
        the requests of both. What they were to write to the pages, others may read: that is the end."""
        if any(self._wrote_pages):
            raise RunnerFailed("memory ran out while pages were written")
        with self._computing, mx.stream(self._stream):
            started = None if self._started is None else self._started()
            if started is not None:
                started.lost = True
            self._residents.give_up_all()
            self._last = self._before = None
        mx.clear_cache()

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        raise ModelRefused(f"adapter {adapter.name}: this version loads no adapters")

    def close(self) -> None:
        """Give the memory back: the runner is of no use afterwards."""
        self._rest.close()
        del self._loaded, self._few, self._residents, self._last, self._before

    def _give_back(self) -> None:
        """Memory of ended requests, and freed memory that MLX keeps, goes back to the system."""
        with self._computing, mx.stream(self._stream):
            started = None if self._started is None else self._started()
            if started is not None and started.unread:  # a long step is no rest
                self._rest.put_off()
                return
            self._before = None
            try:
                self._residents.rest()
                mx.eval(self._residents.take_changed())
                mx.synchronize(self._stream)  # until then CUDA's steps keep what they read
            except (RuntimeError, MemoryError):
                self._residents.ask_again()  # the next step tells it
        mx.clear_cache()


def _in_order(places: NDArray[Any], found: mx.array) -> bool:
    """They name all of `found`, first to last: nothing is to be gathered."""
    return len(places) == len(found) and bool((places == np.arange(len(places))).all())


def _places(work: Work, batch: Batch) -> NDArray[np.int32]:
    """[rows, filled] of the batch's tokens; a row that has fewer is filled up with its last."""
    firsts, ends = batch.row_starts[work.rows][:, None], batch.row_starts[1:][work.rows][:, None]
    return np.minimum(firsts + np.arange(work.filled, dtype=np.int32), ends - 1)


def _last(work: Work) -> int | mx.array:
    """Which of each row's tokens is its last."""
    if len(set(work.new)) == 1:
        return work.new[0] - 1
    return mx.array([new - 1 for new, group in zip(work.new, work.groups, strict=True) for _ in group.padding])
