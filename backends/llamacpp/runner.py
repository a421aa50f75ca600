"""The runner of llama.cpp: computes a batch with llama_decode, and samples from its logits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, Ints, Want
from ...engine.errors import ModelRefused, OutOfMemory
from ...engine.lora import Adapter
from ...engine.runner import RunnerSpec, StepResult
from .adapters import Adapters
from .library import failed, library
from .sampler import Draws, Samplers

Floats = NDArray[np.float32]
# Logits [samples, vocab] and hidden states [samples, hidden]. The rows of samples of the other kind are undefined.
Outputs = tuple[Floats, Floats | None]

NO_CELLS = 1  # results of llama_decode
NO_MEMORY = -2


class Step:
    """A step that llama.cpp computes. See engine.runner.Pending."""

    def __init__(self, draws: Draws, outputs: Callable[[], Outputs], context: threading.Lock) -> None:
        """`outputs`: waits for the outputs of the step. `context`: locked by the thread that uses the context."""
        self._draws = draws
        self._outputs: Callable[[], Outputs] | None = outputs
        self._context = context
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """See engine.runner.Pending."""
        with self._context:
            return self.finish()

    def finish(self) -> StepResult:
        """The result. The caller has the lock of the context."""
        if self._outputs is not None:
            self._result = self._draws.sample(*self._outputs())
            self._outputs = None
        assert self._result is not None
        return self._result


class _Call(NamedTuple):
    """The tokens of one call of llama_decode."""

    order: Ints  # [tokens] indices of the tokens, in llama.cpp's order
    outputs: NDArray[np.bool_]  # [tokens] whether each token has an output, in llama.cpp's order
    hidden: bool  # whether the outputs are hidden states; otherwise they are logits


class Sequences(Protocol):
    """Gives sequences of llama.cpp to rows: see sequences.py."""

    in_order: bool  # whether llama.cpp must get the rows in order of their sequences

    def place(self, batch: Batch) -> Ints: ...


class _Tokens:
    """The llama_batch of a context, whose arrays numpy fills."""

    def __init__(self, size: int, ids: Ints) -> None:
        self._ids = ids
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._counts = np.full(size, ids.shape[1], np.int32)
        self._sequences = np.zeros(size, np.uintp)  # addresses of rows of _ids
        self._outputs = np.zeros(size, np.int8)
        self.batch = library().c.llama_batch()
        for field, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._sequences),
            ("logits", self._outputs),
        ):
            pointer = next(kind for name, kind in self.batch._fields_ if name == field)
            setattr(self.batch, field, ctypes.cast(array.ctypes.data, pointer))

    def place(self, positions: Ints, sequences: Ints, outputs: NDArray[np.bool_]) -> None:
        """Write all fields of the next call except its tokens. All arrays: [tokens]. `outputs`: whether each token has
        an output."""
        count = len(positions)
        self._positions[:count] = positions
        offsets = sequences.astype(np.uintp) * np.uintp(self._ids.strides[0])
        self._sequences[:count] = np.uintp(self._ids.ctypes.data) + offsets
        self._outputs[:count] = outputs
        self.batch.n_tokens = count

    def fill(self, tokens: Ints) -> Any:
        """The llama_batch with these tokens, until the next call."""
        self._tokens[: len(tokens)] = tokens
        return self.batch


class LlamaRunner:
    """See engine.runner.Runner."""

    def __init__(
        self,
        model: Any,
        context: Any,
        spec: RunnerSpec,
        sequences: Sequences,
        ids: Ints,
        adapters: Adapters,
        threads: int,
    ) -> None:
        """`ids`: see sequences.sequence_ids. `threads`: maximum number of threads that sample."""
        self._c = library().c
        self._model = model
        self._context = context
        self._spec = spec
        self._sequences = sequences
        self._adapters = adapters
        self._tokens = _Tokens(spec.max_tokens, ids)
        self._hidden_size = spec.hidden_size
        self._embeds = False  # whether the context returns hidden states
        self._selected = (0, 0.0)  # slot and scale of the last call
        self._computing = threading.Lock()  # only one thread may use the context at a time
        self._step: Step | None = None  # the last step; its outputs are in the context until it is finished
        self._samplers = Samplers(threads)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def run(self, batch: Batch) -> Step:
        """See engine.runner.Runner. It waits for the tokens of the previous step only after all work that
        does not need them."""
        with self._computing:
            sequences = self._sequences.place(batch)
            draws = Draws(batch, self._spec.vocab_size, self._samplers)
            last = np.zeros(batch.num_tokens, np.uint8)
            last[batch.row_starts[1:] - 1] = batch.wants
            places = np.repeat(sequences, np.diff(batch.row_starts))
            if batch.adapters.any() or Want.HIDDEN in batch.wants:
                outputs = self._compute_calls(batch, self._carried(batch), places, last)
                self._step = Step(draws, lambda: outputs, self._computing)
                return self._step
            call = self._place(batch.positions, places, last == Want.TOKEN)
            tokens = self._carried(batch)
            self._adapters.select(self._context, 0, 0.0)
            self._selected = (0, 0.0)
            self._decode(call, tokens)
            self._step = Step(draws, lambda: (self._outputs(call), None), self._computing)
            return self._step

    def _carried(self, batch: Batch) -> Ints:
        """The tokens of the batch, with those that the previous step draws [tokens]. Waits for that step, because the
        next call of llama_decode overwrites its outputs."""
        step = self._step
        self._step = None
        if step is None:
            return batch.tokens
        before = step.finish()
        rows = np.flatnonzero(batch.carry >= 0)
        if not len(rows):
            return batch.tokens
        tokens = batch.tokens.copy()
        tokens[batch.row_starts[rows + 1] - 1] = before.tokens[before.row_starts[batch.carry[rows]]]
        return tokens

    def _compute_calls(self, batch: Batch, tokens: Ints, places: Ints, last: NDArray[np.uint8]) -> Outputs:
        """The outputs of a batch with adapters or hidden states, which need several calls of llama.cpp. `places`: the
        sequence of each token [tokens]. `last`: the wish of each row at its last token [tokens]."""
        rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_starts))
        samples = batch.sample_starts
        logits = _zeros(samples[-1], self._spec.vocab_size)
        hidden = _zeros(samples[-1], self._hidden_size) if Want.HIDDEN in batch.wants else None
        groups = _groups(batch)
        for slot, scale in sorted(groups, key=lambda pair: pair != self._selected):  # a change takes llama.cpp long
            members = groups[slot, scale]
            self._adapters.select(self._context, slot, scale)
            self._selected = slot, scale
            for want, target in ((Want.TOKEN, logits), (Want.HIDDEN, hidden)):
                # The tokens before the last one of a row of hidden states belong to the first call.
                chosen = np.flatnonzero(members[rows] & ((last == Want.HIDDEN) == (want == Want.HIDDEN)))
                if target is None or not len(chosen):
                    continue
                outputs = last[chosen] == want
                call = self._place(batch.positions[chosen], places[chosen], outputs, hidden=want == Want.HIDDEN)
                self._decode(call, tokens[chosen])
                target[samples[rows[chosen[outputs]]]] = self._outputs(call)
        return logits, hidden

    def _place(self, positions: Ints, places: Ints, outputs: NDArray[np.bool_], *, hidden: bool = False) -> _Call:
        """Prepare a call of llama_decode. All arrays: [tokens]."""
        order = np.arange(len(places))
        if self._sequences.in_order:
            order = np.argsort(places, kind="stable")
        self._tokens.place(positions[order], places[order], outputs[order])
        return _Call(order, outputs[order], hidden)

    def _decode(self, call: _Call, tokens: Ints) -> None:
        """Begin to compute a call. A GPU computes while this method returns."""
        library().forget_errors()
        if call.hidden != self._embeds:
            self._c.llama_set_embeddings(self._context, call.hidden)
            self._embeds = call.hidden
        code = self._c.llama_decode(self._context, self._tokens.fill(tokens[call.order]))
        if code in (NO_CELLS, NO_MEMORY):
            raise OutOfMemory(str(failed("llama.cpp has no memory for the step")))
        if code:
            raise failed(f"llama_decode failed with code {code}")

    def _outputs(self, call: _Call) -> Floats:
        """The outputs of the last call [outputs, vocab or hidden], in order of the tokens. Waits for the call. Valid
        until the next call."""
        width = self._hidden_size if call.hidden else self._spec.vocab_size
        count = int(np.count_nonzero(call.outputs))
        if not count:
            return _zeros(0, width)
        values = self._c.llama_get_embeddings if call.hidden else self._c.llama_get_logits
        computed = np.ctypeslib.as_array(values(self._context), (count, width))
        samples = call.order[call.outputs]
        in_place = bool((samples[:-1] < samples[1:]).all())
        return computed if in_place else computed[np.argsort(samples)]

    def _finish(self) -> None:
        """Wait for the step that the device computes."""
        if self._step is not None:
            self._step.finish()

    def prepare_adapter(self, adapter: Adapter) -> None:
        """See engine.runner.Runner."""
        if not self._spec.num_adapters:
            raise ModelRefused(
                f"adapter {adapter.name}: the model was loaded without adapter slots", self._spec.slots_hint
            )
        with self._computing:  # a step iterates over the adapters of the model
            self._adapters.prepare(adapter)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """See engine.runner.Runner."""
        self._adapters.load(slot, adapter)

    def forget_adapter(self, adapter: Adapter) -> None:
        """See engine.runner.Runner."""
        with self._computing:
            self._finish()
            self._adapters.select(self._context, 0, 0.0)
            self._adapters.forget(adapter)

    def close(self) -> None:
        """Free the memory. The runner cannot be used afterwards."""
        with self._computing:
            self._finish()
            self._samplers.close()
            self._c.llama_free(self._context)
            self._c.llama_model_free(self._model)


def _zeros(count: int, width: int) -> Floats:
    return np.zeros((count, width), np.float32)


def _groups(batch: Batch) -> dict[tuple[int, float], NDArray[np.bool_]]:
    """(slot, scale) -> the rows [rows] with this adapter and scale. llama.cpp computes one adapter in a call."""
    scales = np.where(batch.adapters > 0, batch.adapter_scales, np.float32(0))
    adapters = np.where(scales != 0, batch.adapters, 0)
    pairs = sorted(set(zip(adapters.tolist(), scales.tolist(), strict=True)))
    return {pair: (adapters == pair[0]) & (scales == np.float32(pair[1])) for pair in pairs}
