"""The loop: plan a step, start it, take in the one before. One thread, one runner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from .drafts import Drafter
from .errors import EngineError, OutOfMemory, RunnerFailed
from .kv import KVCache
from .lora import Adapter, AdapterPool
from .request import Delta, Request
from .runner import Pending, Runner, StepResult
from .scheduler import Scheduler
from .stats import Stats

# Steps without memory, one right after the other, that a runner is forgiven: a new one is planned by what is free then.
MOST_SHORTAGES = 2


def _ignore(_: object) -> None:
    pass


class Engine:
    """Runs requests on a runner, many at a time.

    After start() a thread of its own makes the steps and calls `on_deltas` once after each, with everything new;
    every request that was accepted ends with exactly one delta that has a `finish`, unless a step fails: then
    `on_failure` is called once, with the requests that are lost, the engine takes no more, and the runner is left to
    close(), as closing a broken device may hang. A step without memory ends its own requests only. Both callbacks come
    on that thread and should return soon. Without start(), step() makes one step on the caller's thread.
    submit, cancel, stats and the adapter methods may be called from any thread.
    """

    def __init__(
        self,
        runner: Runner,
        on_deltas: Callable[[list[Delta]], None] = _ignore,
        on_failure: Callable[[RunnerFailed], None] = _ignore,
        drafter: Drafter | None = None,
    ) -> None:
        """Raises EngineError for a drafter where the runner takes no drafts."""
        spec = runner.spec
        self._runner, self._on_deltas, self._on_failure = runner, on_deltas, on_failure
        self._adapters = AdapterPool(spec.num_adapters, spec.adapters_per_step, runner.load_adapter)
        self._scheduler = Scheduler(spec, KVCache(spec), self._adapters, drafter)
        self._overlap = spec.overlap
        self._in_flight: Pending | None = None
        self._state = threading.Condition()  # guards all of the scheduler and the adapters
        self._closed = False
        self._thread: threading.Thread | None = None
        self._host_seconds = self._step_seconds = 0.0
        self._began: float | None = None  # when the step under way did
        self._shortages = 0
        self._left_open = False  # the runner, after a failure

    def submit(self, request: Request) -> None:
        """Take a request in. Raises RequestRefused for what can never run, EngineError when closed."""
        with self._state:
            if self._closed:
                raise EngineError("the engine is closed")
            self._scheduler.add(request)
            self._state.notify()

    def cancel(self, request_id: str) -> bool:
        """End a request: its memory is free at once, its last delta comes with the next step. False: it has ended."""
        with self._state:
            return self._scheduler.cancel(request_id)  # the thread is awake: a live request is work

    def register_adapter(self, adapter: Adapter) -> None:
        """Make an adapter known; requests may name it from now on."""
        with self._state:
            self._adapters.register(adapter)

    def find_adapter(self, name: str) -> Adapter | None:
        with self._state:
            return self._adapters.find(name)

    def stats(self) -> Stats:
        with self._state:
            began = self._began
            return replace(
                self._scheduler.stats(),
                step_host_seconds=self._host_seconds,
                step_seconds=self._step_seconds,
                step_age=0.0 if began is None else time.perf_counter() - began,
            )

    @property
    def has_work(self) -> bool:
        with self._state:
            return self._scheduler.has_work

    def step(self) -> list[Delta]:
        """Plan and start a step, and take in the step before (without overlap: this one). Not thread-safe."""
        began = time.perf_counter()
        with self._state:
            batch = self._scheduler.schedule()
        planned = self._began = time.perf_counter()
        try:
            started = self._runner.run(batch) if batch is not None else None
        except OutOfMemory as error:
            return self._step_without_memory(error)
        if self._overlap:
            started, self._in_flight = self._in_flight, started
        try:
            result = self._result(started)
        except OutOfMemory as error:
            return self._answers_without_memory(error)
        computed, self._began = time.perf_counter(), None
        with self._state:
            deltas = self._scheduler.commit(result) if result is not None else []
            deltas += self._scheduler.take_ended()
            if batch is not None or result is not None:
                ended = time.perf_counter()
                self._host_seconds += ended - computed + planned - began
                self._step_seconds += ended - began
            elif not deltas and self._scheduler.has_work:
                raise EngineError("requests wait, but none can be computed: this is a bug in the scheduler")
        return deltas

    def _result(self, step: Pending | None) -> StepResult | None:
        if step is None:
            return None
        result = step.result()
        self._shortages = 0
        return result

    def _step_without_memory(self, error: OutOfMemory) -> list[Delta]:
        """The step planned last is lost; the one before ends as ever."""
        before, self._in_flight = self._in_flight, None
        try:
            result = self._result(before)
        except OutOfMemory as earlier:
            return self._answers_without_memory(earlier)
        with self._state:
            deltas = self._scheduler.commit(result) if result is not None else []
        return deltas + self._without_memory(error)

    def _answers_without_memory(self, error: OutOfMemory) -> list[Delta]:
        """A step that was started is lost, and with it the next where that is under way: that reads its tokens and
        pages."""
        after, self._in_flight = self._in_flight, None
        if after is not None:
            with suppress(OutOfMemory):
                after.result()
        return self._without_memory(error)

    def _without_memory(self, error: OutOfMemory) -> list[Delta]:
        """End the requests of all steps that are not committed, unless this happens too often."""
        self._began = None
        self._shortages += 1
        if self._shortages > MOST_SHORTAGES:
            raise error
        with self._state:
            self._scheduler.give_up(str(error))
            return self._scheduler.take_ended()

    def start(self) -> None:
        """Begin to make steps on a thread of its own, which sleeps while there is nothing to do."""
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the step in flight, end what is left as cancelled, and close the runner. May be repeated."""
        with self._state:
            again, self._closed = self._closed, True
            self._state.notify()
        if self._thread is None:
            if not again:
                self._end_rest()
                self._runner.close()
        elif self._thread is not threading.current_thread():
            self._thread.join()
            with self._state:
                close, self._left_open = self._left_open, False
            if close:
                self._runner.close()

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                deltas = self.step()
                if deltas:
                    self._on_deltas(deltas)
            self._end_rest()
        except Exception as error:  # whatever broke, nothing of the step can be trusted: say so once and end
            self._fail(error)
        else:
            self._runner.close()

    def _wait_for_work(self) -> bool:
        with self._state:
            while not self._closed and not self._scheduler.has_work:
                self._state.wait()
            return not self._closed

    def _end_rest(self) -> None:
        if self._in_flight is not None:
            with suppress(OutOfMemory):  # its requests end all the same
                self._in_flight.result()
        with self._state:
            for request_id in self._scheduler.request_ids:
                self._scheduler.cancel(request_id)
            deltas = self._scheduler.take_ended()
        if deltas:
            self._on_deltas(deltas)

    def _fail(self, error: Exception) -> None:
        with self._state:
            self._closed = self._left_open = True
            lost = self._scheduler.request_ids
        failure = RunnerFailed(str(error) or type(error).__name__, lost)
        failure.__cause__ = error
        self._on_failure(failure)
