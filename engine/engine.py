"""The loop of the engine: plan a step, start it, commit the previous step. It uses one thread and one runner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

from .batch import Batch
from .drafts import Drafter
from .errors import EngineError, OutOfMemory, RunnerFailed
from .kv import KVCache
from .lora import Adapter, AdapterPool
from .request import Delta, Request
from .runner import Pending, Runner, StepResult
from .scheduler import Scheduler
from .stats import Stats

# Consecutive steps that may run out of memory. After one more the engine fails, so that a new runner can be created
# with a cache that fits in the free memory.
MAX_SHORTAGES = 2


def _ignore(_: object) -> None:
    pass


class Engine:
    """Runs many requests at a time on one runner.

    start() starts a thread that makes the steps. It calls `on_deltas` after each step with all new deltas. Every
    accepted request ends with exactly one delta that has a `finish`. A step that runs out of memory ends its own
    requests only. If a step fails, `on_failure` is called once with the lost requests, and the engine accepts no more
    requests. Only close() closes the runner then, because closing a broken device may hang. Callbacks run on the thread
    of the engine and should return soon. Another thread loads adapters into their slots meanwhile: a request waits for
    its adapter, and the others go on. Without start(), step() makes one step on the caller's thread, and loads adapters
    there.
    submit, cancel, stats and the adapter methods may be called from any thread.
    """

    def __init__(
        self,
        runner: Runner,
        on_deltas: Callable[[list[Delta]], None] = _ignore,
        on_failure: Callable[[RunnerFailed], None] = _ignore,
        drafter: Drafter | None = None,
    ) -> None:
        """Raises EngineError if there is a drafter, but the runner verifies no drafts."""
        spec = runner.spec
        self._runner = runner
        self._on_deltas = on_deltas
        self._on_failure = on_failure
        self._adapters = AdapterPool(spec.num_adapters, spec.adapters_per_step, self._start_load, runner.forget_adapter)
        self._loader = ThreadPoolExecutor(1, "adapters")  # loads adapters while steps go on; starts at the first load
        self._scheduler = Scheduler(spec, KVCache(spec), self._adapters, drafter)
        self._overlap = spec.overlap
        self._in_flight: Pending | None = None
        self._state = threading.Condition()  # guards the scheduler and the adapters
        self._closed = False
        self._thread: threading.Thread | None = None
        self._host_seconds = 0.0
        self._step_seconds = 0.0
        self._began: float | None = None  # time at which the current step began
        self._shortages = 0
        self._left_open = False  # True: the engine failed, and close() must still close the runner

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused for a request that can never run, and EngineError if the engine is
        closed."""
        with self._state:
            if self._closed:
                raise EngineError("the engine is closed")
            self._scheduler.add(request)
            self._state.notify()

    def cancel(self, request_id: str) -> bool:
        """End a request. Its memory is free at once, and the next step returns its last delta. Returns False if there
        is no such request."""
        with self._state:
            self._state.notify()  # the thread sleeps if all requests wait for their adapters
            return self._scheduler.cancel(request_id)

    def register_adapter(self, adapter: Adapter, *, pinned: bool = False) -> None:
        """Read an adapter to main memory while steps go on, and register it, so that requests may use it.

        Raises ModelRefused if the adapter does not fit the base model, and RequestRefused if it cannot be pinned.
        """
        with self.prepared_adapter(adapter), self._state:
            if self._closed:
                raise EngineError("the engine is closed")
            self._adapters.register(adapter, pinned=pinned)

    @contextmanager
    def prepared_adapter(self, adapter: Adapter) -> Iterator[None]:
        """Read an adapter to main memory while steps go on, and keep it there until the end of the `with` block.

        Inside the block, `register_adapter` need not read the files again. The adapter stays in memory even if its last
        request ends meanwhile. Raises ModelRefused if the adapter does not fit the base model.
        """
        with self._state:
            self._adapters.begin(adapter)
        try:
            self._runner.prepare_adapter(adapter)
            yield
        finally:
            with self._state:
                self._adapters.end(adapter)

    def unregister_adapter(self, name: str) -> bool:
        """Accept no more requests for an adapter; requests in progress still use it. Returns False if no adapter has
        this name."""
        with self._state:
            return self._adapters.unregister(name) is not None

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The registered adapters."""
        with self._state:
            return self._adapters.registered

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
        """Plan and start a step, then commit the previous step. If the device cannot overlap steps, commit this step.

        Returns the new deltas. Not thread-safe."""
        began = time.perf_counter()
        batch = self._plan()
        if batch is None and self._in_flight is None:
            with self._state:
                return self._scheduler.take_ended()
        planned = self._began = time.perf_counter()
        try:
            pending = self._launch(batch)
        except OutOfMemory as error:
            return self._step_without_memory(error)
        try:
            result = self._result(pending)
        except OutOfMemory as error:
            return self._lose_step(error)
        computed = time.perf_counter()
        self._began = None
        with self._state:
            deltas = self._commit(result) + self._scheduler.take_ended()
        ended = time.perf_counter()
        self._host_seconds += ended - computed + planned - began
        self._step_seconds += ended - began
        return deltas

    def _plan(self) -> Batch | None:
        """Plan the next step. If requests wait for their adapters and there is no step, sleep until a load ends, or
        until a request arrives or is cancelled."""
        with self._state:
            batch = self._scheduler.schedule()
            if batch is not None or self._in_flight is not None or self._scheduler.has_ended:
                return batch
            if not self._adapters.is_loading and self._scheduler.has_work:
                raise EngineError(
                    "requests wait, but the scheduler plans no step for them: this is a bug in the scheduler"
                )
            if self._adapters.is_loading and not self._closed:
                self._state.wait()
        return None

    def _launch(self, batch: Batch | None) -> Pending | None:
        """Start a step. Returns the step to commit now: the previous one if the device overlaps steps, else this."""
        started = None if batch is None else self._runner.run(batch)
        if not self._overlap:
            return started
        before, self._in_flight = self._in_flight, started
        return before

    def _commit(self, result: StepResult | None) -> list[Delta]:
        return [] if result is None else self._scheduler.commit(result)

    def _start_load(self, slot: int, adapter: Adapter) -> None:
        """Start to load an adapter into a slot that no step reads."""
        if self._thread is None:
            self._load(slot, adapter)
        else:
            self._loader.submit(self._load, slot, adapter)

    def _load(self, slot: int, adapter: Adapter) -> None:
        error: Exception | None = None
        try:
            self._runner.load_adapter(slot, adapter)
        except Exception as failure:  # the next request for the adapter raises it
            error = failure
        with self._state:
            self._adapters.loaded(adapter, error)
            self._state.notify()

    def _result(self, step: Pending | None) -> StepResult | None:
        if step is None:
            return None
        result = step.result()
        self._shortages = 0
        return result

    def _step_without_memory(self, error: OutOfMemory) -> list[Delta]:
        """Handle a step that ran out of memory when it was started: commit the previous step, then end the requests of
        the lost step."""
        before = self._in_flight
        self._in_flight = None
        try:
            result = self._result(before)
        except OutOfMemory as earlier:
            return self._lose_step(earlier)
        with self._state:
            deltas = self._commit(result)
        return deltas + self._without_memory(error)

    def _lose_step(self, error: OutOfMemory) -> list[Delta]:
        """Handle a started step that ran out of memory. The step after it is also lost, because it reads tokens and
        pages of the first."""
        after = self._in_flight
        self._in_flight = None
        if after is not None:
            with suppress(OutOfMemory):
                after.result()
        return self._without_memory(error)

    def _without_memory(self, error: OutOfMemory) -> list[Delta]:
        """End the requests of all uncommitted steps. If more than MAX_SHORTAGES consecutive steps ran out of memory,
        raises `error` instead."""
        self._began = None
        self._shortages += 1
        if self._shortages > MAX_SHORTAGES:
            raise error
        with self._state:
            self._scheduler.give_up(str(error))
            return self._scheduler.take_ended()

    def start(self) -> None:
        """Start the thread that makes the steps. It sleeps while there is no work."""
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the step in flight, cancel all requests, and close the runner. A second call does nothing."""
        with self._state:
            was_closed = self._closed
            self._closed = True
            self._state.notify()
        if self._thread is None:
            if not was_closed:
                self._end_requests()
                self._close_runner()
        elif self._thread is not threading.current_thread():
            self._thread.join()
            with self._state:
                left_open = self._left_open
                self._left_open = False
            if left_open:
                self._close_runner()

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                deltas = self.step()
                if deltas:
                    self._on_deltas(deltas)
            self._end_requests()
        except Exception as error:  # the state is unknown after any error: report it and end
            self._fail(error)
        else:
            self._close_runner()

    def _close_runner(self) -> None:
        self._loader.shutdown(cancel_futures=True)
        self._runner.close()

    def _wait_for_work(self) -> bool:
        with self._state:
            while not self._closed and not self._scheduler.has_work:
                self._state.wait()
            return not self._closed

    def _end_requests(self) -> None:
        if self._in_flight is not None:
            with suppress(OutOfMemory):  # the requests of this step end anyway
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
        self._loader.shutdown(wait=False, cancel_futures=True)  # a load may hang on the broken device
        failure = RunnerFailed(str(error) or type(error).__name__, lost)
        failure.__cause__ = error
        self._on_failure(failure)
