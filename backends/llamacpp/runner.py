"""The runner of llama.cpp: computes a batch with llama_decode, and samples from its logits."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, Ints, Want
from ...engine.errors import ModelRefused, OutOfMemory
from ...engine.lora import Adapter
from ...engine.runner import RunnerSpec, StepResult
from .adapters import Adapters
from .library import failed, library
from .sampler import sample

Floats = NDArray[np.float32]

NO_CELLS = 1  # results of llama_decode
NO_MEMORY = -2


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was computed."""

    step: StepResult

    def result(self) -> StepResult:
        return self.step


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

    def fill(self, tokens: Ints, positions: Ints, sequences: Ints, outputs: NDArray[np.bool_]) -> Any:
        """The llama_batch of these tokens, until the next call. `outputs`: whether each token has an output."""
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        offsets = sequences.astype(np.uintp) * np.uintp(self._ids.strides[0])
        self._sequences[:count] = np.uintp(self._ids.ctypes.data) + offsets
        self._outputs[:count] = outputs
        self.batch.n_tokens = count
        return self.batch


class LlamaRunner:
    """See engine.runner.Runner."""

    def __init__(
        self, model: Any, context: Any, spec: RunnerSpec, sequences: Sequences, ids: Ints, adapters: Adapters
    ) -> None:
        """`ids`: see sequences.sequence_ids."""
        self._c = library().c
        self._model = model
        self._context = context
        self._spec = spec
        self._sequences = sequences
        self._adapters = adapters
        self._tokens = _Tokens(spec.max_tokens, ids)
        self._hidden_size = self._c.llama_model_n_embd_out(model)
        self._embeds = False  # whether the context returns hidden states
        self._selected = (0, 0.0)  # slot and scale of the last call
        self._computing = threading.Lock()  # only one thread may use the context at a time

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def run(self, batch: Batch) -> Done:
        """See engine.runner.Runner."""
        with self._computing:
            logits, hidden = self._compute(batch, self._sequences.place(batch))
            return Done(sample(logits, batch, hidden))

    def _compute(self, batch: Batch, sequences: Ints) -> tuple[Floats, Floats | None]:
        """(logits [answers, vocab], hidden states [answers, hidden]). The rows of answers of the other kind are
        undefined."""
        last = np.zeros(batch.num_tokens, np.uint8)
        last[batch.row_starts[1:] - 1] = batch.wants
        places = np.repeat(sequences, np.diff(batch.row_starts))
        if batch.adapters.any() or Want.HIDDEN in batch.wants:
            return self._compute_calls(batch, places, last)
        self._adapters.select(self._context, 0, 0.0)
        self._selected = (0, 0.0)
        logits = self._decode(batch.tokens, batch.positions, places, last == Want.TOKEN)
        return self._zeros(0, self._spec.vocab_size) if logits is None else logits, None

    def _compute_calls(self, batch: Batch, places: Ints, last: NDArray[np.uint8]) -> tuple[Floats, Floats | None]:
        """The same for a batch with adapters or hidden states, which need several calls of llama.cpp. `places`: the
        sequence of each token [tokens]. `last`: the wish of each row at its last token [tokens]."""
        rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_starts))
        answers = batch.answer_starts
        logits = self._zeros(answers[-1], self._spec.vocab_size)
        hidden = self._zeros(answers[-1], self._hidden_size) if Want.HIDDEN in batch.wants else None
        groups = _groups(batch)
        for slot, scale in sorted(groups, key=lambda pair: pair != self._selected):  # a change takes llama.cpp long
            members = groups[slot, scale]
            self._adapters.select(self._context, slot, scale)
            self._selected = slot, scale
            for want, target in ((Want.TOKEN, logits), (Want.HIDDEN, hidden)):
                # The tokens before the last one of a row of hidden states belong to the first call.
                tokens = np.flatnonzero(members[rows] & ((last == Want.HIDDEN) == (want == Want.HIDDEN)))
                if target is None or not len(tokens):
                    continue
                outputs = last[tokens] == want
                values = self._decode(
                    batch.tokens[tokens], batch.positions[tokens], places[tokens], outputs, hidden=want == Want.HIDDEN
                )
                if values is not None:
                    target[answers[rows[tokens[outputs]]]] = values
        return logits, hidden

    def _zeros(self, count: int, width: int) -> Floats:
        return np.zeros((count, width), np.float32)

    def _decode(
        self, tokens: Ints, positions: Ints, places: Ints, outputs: NDArray[np.bool_], *, hidden: bool = False
    ) -> Floats | None:
        """Compute tokens. Returns the logits of those with an output, or their hidden states, in order; valid until the
        next call. None: no token has an output."""
        order = np.argsort(places, kind="stable") if self._sequences.in_order else np.arange(len(places))
        ready = self._tokens.fill(tokens[order], positions[order], places[order], outputs[order])
        library().forget_errors()
        if hidden != self._embeds:
            self._c.llama_set_embeddings(self._context, hidden)
            self._embeds = hidden
        code = self._c.llama_decode(self._context, ready)
        if code in (NO_CELLS, NO_MEMORY):
            raise OutOfMemory(str(failed("llama.cpp has no memory for the step")))
        if code:
            raise failed(f"llama_decode failed with code {code}")
        count = int(np.count_nonzero(outputs))
        if not count:
            return None
        width = self._hidden_size if hidden else self._spec.vocab_size
        values = self._c.llama_get_embeddings if hidden else self._c.llama_get_logits
        computed = np.ctypeslib.as_array(values(self._context), (count, width))
        answers = order[outputs[order]]  # indices of the tokens with an output, in llama.cpp's order
        in_place = bool((answers[:-1] < answers[1:]).all())
        return computed if in_place else computed[np.argsort(answers)]

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
            self._adapters.select(self._context, 0, 0.0)
            self._adapters.forget(adapter)

    def close(self) -> None:
        """Free the memory. The runner cannot be used afterwards."""
        with self._computing:
            self._c.llama_free(self._context)
            self._c.llama_model_free(self._model)


def _groups(batch: Batch) -> dict[tuple[int, float], NDArray[np.bool_]]:
    """(slot, scale) -> the rows [rows] with this adapter and scale. llama.cpp computes one adapter in a call."""
    scales = np.where(batch.adapters > 0, batch.adapter_scales, np.float32(0))
    adapters = np.where(scales != 0, batch.adapters, 0)
    pairs = sorted(set(zip(adapters.tolist(), scales.tolist(), strict=True)))
    return {pair: (adapters == pair[0]) & (scales == np.float32(pair[1])) for pair in pairs}
