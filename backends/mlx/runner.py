"""The runner of MLX: computes a plan with one model of mlx-lm and its caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakMethod, ref

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, Ints, Want
from ...engine.errors import ModelRefused, OutOfMemory, RunnerFailed
from ...engine.lora import Adapter
from ...engine.runner import RunnerSpec, StepResult
from .cache import Caches
from .failures import engine_errors
from .loading import Loaded
from .lora import AdapterSlots
from .plan import Call, Plan, Planner
from .sampler import Drawn, sample

IDLE = 5.0  # seconds


class _Last(NamedTuple):
    """The tokens that the last step drew, as lazy arrays."""

    tokens: mx.array  # [samples]
    starts: Ints  # [rows + 1], index of each row's first sample


class _Output(NamedTuple):
    """The outputs of one call of the model, for the last token of each row."""

    rows: list[int]  # row indices in the batch
    logits: mx.array  # [rows, vocab]
    hidden: mx.array  # [rows, hidden]


class MlxPending:
    """A step that was started."""

    lost = False  # whether the step was lost because the previous step, whose tokens it reads, failed

    def __init__(
        self,
        batch: Batch,
        drawn: Drawn | None,
        hidden: mx.array | None,
        on_end: Callable[[], None],
        on_out_of_memory: Callable[[], None],  # raises RunnerFailed if no step may follow
    ) -> None:
        self._row_starts = batch.sample_starts
        self._drawn = drawn
        self._hidden = hidden
        self._on_end = on_end
        self._on_out_of_memory = on_out_of_memory
        self.unread = True

    def result(self) -> StepResult:
        """See engine.runner.Pending."""
        try:
            if self.lost:
                raise OutOfMemory("the previous step ran out of memory")
            with engine_errors():
                return self._result()
        except OutOfMemory:
            if not self.lost:
                self._on_out_of_memory()
            raise
        finally:
            self.unread = False
            self._on_end()

    def _result(self) -> StepResult:
        if self._drawn is None:
            return StepResult(np.zeros(0, np.int32), self._row_starts)
        tokens = _values(self._drawn.tokens)
        arrays = (*self._drawn.logprobs, self._hidden)
        chosen, top_tokens, top, hidden = (None if array is None else _values(array) for array in arrays)
        return StepResult(tokens, self._row_starts, chosen, top_tokens, top, hidden)


def _values(array: mx.array) -> NDArray[Any]:
    """The array in numpy: float32 stays float32, integers become int32."""
    return np.array(array).astype(np.float32 if array.dtype == mx.float32 else np.int32)


class _IdleTimer:
    """Calls a method on another thread if `restart` was not called for some seconds. The timer has only a weak
    reference to the object of the method."""

    def __init__(self, seconds: float, method: Callable[[], None]) -> None:
        self._seconds = seconds
        self._method = WeakMethod(method)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._last = 0.0

    def restart(self) -> None:
        self._last = time.monotonic()  # cheaper than a new timer for each step
        with self._lock:
            if self._timer is None:
                self._wait(self._seconds)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._check)
        self._timer.daemon = True
        self._timer.start()

    def _check(self) -> None:
        with self._lock:
            left = self._last + self._seconds - time.monotonic()
            if left > 0:
                self._wait(left)
                return
            self._timer = None
        method = self._method()
        if method is not None:
            method()


class MlxRunner:
    """See engine.runner.Runner."""

    def __init__(
        self,
        loaded: Loaded,
        adapters: AdapterSlots,
        spec: RunnerSpec,
        planner: Planner,
        caches: Caches,
        stream: mx.Stream,
    ) -> None:
        self._loaded = loaded
        self._adapters = adapters
        self._spec = spec
        self._planner = planner
        self._caches = caches
        self._stream = stream
        self._computing = threading.Lock()  # only one thread may use the stream at a time
        self._last: _Last | None = None
        self._last_pending: Callable[[], MlxPending | None] = lambda: None  # a weak reference
        self._wrote_pages = (False, False)  # whether the last step, and the step before it, wrote pages of the pool
        self._idle_timer = _IdleTimer(IDLE, self._release)
        self._closed = False

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def run(self, batch: Batch) -> MlxPending:
        """See engine.runner.Runner."""
        self._idle_timer.restart()
        with self._computing, mx.stream(self._stream):
            try:
                with engine_errors():
                    return self._start(batch)
            except OutOfMemory as error:
                shortage = OutOfMemory(str(error))  # `error` has a traceback, which keeps the step's arrays
            self._planner.fail()
            self._reset()
        raise shortage

    def _start(self, batch: Batch) -> MlxPending:
        plan = self._planner.plan(batch)
        self._wrote_pages = (plan.writes_pages, self._wrote_pages[0])
        tokens = self._tokens(batch)
        self._write(plan)
        outputs: list[_Output] = []
        for make, call, write in plan.temporary:
            self._caches.make(make)
            outputs.append(self._compute_now(call, batch, tokens))
            self._caches.write_pages([write])
            self._caches.pool.settle()
            del self._caches.groups[call.group]
        for make in plan.makes:
            self._caches.make(make)
        self._caches.keep(self._planner.groups)
        outputs += [self._compute(call, batch, tokens) for call in plan.calls]
        return self._sample(batch, plan, outputs)

    def _sample(self, batch: Batch, plan: Plan, outputs: list[_Output]) -> MlxPending:
        """Sample tokens from the outputs, and start the computation of the step."""
        sample_rows: list[int] = np.flatnonzero(batch.wants != Want.NOTHING).tolist()
        sampled = [output for output in outputs if not set(sample_rows).isdisjoint(output.rows)]
        silent = [self._caches.groups[call.group] for call in plan.calls if set(sample_rows).isdisjoint(call.rows)]
        waited = [array for group in silent for array in group.arrays]
        drawn = None
        hidden = None
        if sample_rows:
            drawn = sample(_ordered([output.logits for output in sampled], sampled, sample_rows), batch)
            waited += drawn.arrays
        if (batch.wants == Want.HIDDEN).any():
            hidden = _ordered([output.hidden for output in sampled], sampled, sample_rows).astype(mx.float32)
            waited.append(hidden)
        mx.async_eval(waited)
        self._last = None if drawn is None else _Last(drawn.tokens, batch.sample_starts)
        pending = MlxPending(batch, drawn, hidden, self._idle_timer.restart, self._lose_steps)
        self._last_pending = ref(pending)
        return pending

    def _write(self, plan: Plan) -> None:
        """Write pages before the step reads them, and free the groups that the plan drops. Before a write the previous
        step must end: MLX copies the whole pool if a step still reads it."""
        if plan.writes_pages:
            mx.synchronize(self._stream)
        self._caches.write(plan)
        self._caches.pool.settle()
        self._caches.keep({*self._planner.groups, *plan.sources})

    def _compute_now(self, call: Call, batch: Batch, tokens: mx.array) -> _Output:
        """Compute a call and wait for its end."""
        output = self._compute(call, batch, tokens)
        mx.eval(output.logits, output.hidden, self._caches.groups[call.group].arrays)
        mx.synchronize(self._stream)
        return output

    def _compute(self, call: Call, batch: Batch, tokens: mx.array) -> _Output:
        group = self._caches.groups[call.group]
        group.set_offsets()
        positions = batch.row_starts[call.rows][:, None] + np.arange(call.new, dtype=np.int32)
        inputs = _gathered(tokens, positions.ravel()).reshape(positions.shape)
        self._adapters.select(batch.adapters[call.rows], batch.adapter_scales[call.rows])
        logits, hidden = self._loaded.forward(inputs, group.layers)
        group.lengths = [length + call.new for length in group.lengths]
        return _Output(call.rows, logits, hidden)

    def _tokens(self, batch: Batch) -> mx.array:
        """The input tokens [tokens] of the batch, including the carried tokens, which the last step drew."""
        rows = np.flatnonzero(batch.carry >= 0)
        if not len(rows):
            return mx.array(batch.tokens)
        assert self._last is not None, "a row carries from a step that drew nothing"
        drawn = _gathered(self._last.tokens, self._last.starts[batch.carry[rows]])
        if len(rows) == batch.num_tokens:
            return drawn
        tokens = mx.array(batch.tokens)
        tokens[mx.array(batch.row_starts[1:][rows] - 1)] = drawn
        return tokens

    def _lose_steps(self) -> None:
        """Record that the last two steps failed: all positions that the pool does not have are lost. The engine
        ends the requests of both steps.

        If one of the steps wrote pages, other requests may read them. Then no step may follow: raises RunnerFailed."""
        if any(self._wrote_pages):
            raise RunnerFailed("memory ran out while pages were written")
        with self._computing, mx.stream(self._stream):
            pending = self._last_pending()
            if pending is not None:
                pending.lost = True
            self._planner.fail_all()
            self._reset()

    def _reset(self) -> None:
        """Free the groups of a failed step."""
        self._caches.keep(self._planner.groups)
        self._last = None
        mx.clear_cache()

    def prepare_adapter(self, adapter: Adapter) -> None:
        """See engine.runner.Runner."""
        if not self._spec.num_adapters:
            raise ModelRefused(
                f"adapter {adapter.name}: the model was loaded without adapter slots", self._spec.slots_hint
            )
        self._adapters.prepare(adapter)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """See engine.runner.Runner."""
        with self._computing, mx.stream(self._stream), engine_errors():
            self._adapters.load(slot, adapter)

    def forget_adapter(self, adapter: Adapter) -> None:
        """See engine.runner.Runner."""
        self._adapters.forget(adapter)

    def close(self) -> None:
        """Free the memory. The runner cannot be used afterwards."""
        self._idle_timer.cancel()
        with self._computing:
            self._closed = True
            del self._loaded, self._adapters, self._planner, self._caches, self._last

    def _release(self) -> None:
        """Free the groups, and the memory that MLX caches."""
        with self._computing, mx.stream(self._stream):
            if self._closed:
                return
            pending = self._last_pending()
            if pending is not None and pending.unread:  # a long step is still running
                self._idle_timer.restart()
                return
            try:
                self._caches.write(self._planner.release_all())
                self._caches.keep(())
                self._caches.pool.settle()
            except (RuntimeError, MemoryError):
                pass  # not enough memory: the writes stay lazy, and the next step computes them
        mx.clear_cache()


def _ordered(arrays: list[mx.array], outputs: list[_Output], sample_rows: Sequence[int]) -> mx.array:
    """The values [samples, …] in the batch's order. `arrays` has one array [rows, …] for each output."""
    positions = {row: position for position, row in enumerate(chain.from_iterable(x.rows for x in outputs))}
    if not positions.keys() >= set(sample_rows):
        raise RunnerFailed("a row without pages wants a sample: this is a bug in the engine")
    joined = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
    return _gathered(joined, np.array([positions[row] for row in sample_rows]))


def _gathered(array: mx.array, indices: NDArray[Any]) -> mx.array:
    """array[indices]. If the indices select the whole array in order, the result is the array itself."""
    in_order = len(indices) == len(array) and bool((indices == np.arange(len(indices))).all())
    return array if in_order else array[mx.array(indices)]
