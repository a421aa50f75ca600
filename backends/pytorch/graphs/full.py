"""Decode steps captured whole: one recording for each number of rows, replayed with new numbers in the same places.

All that a step computes up to the last hidden states is in the recording: taking in carried tokens, embedding, layers,
norm. The head over the vocabulary and the draw follow as ever: they depend on what each request asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ....engine.batch import Batch, Want
from ....engine.graphs import Shape, choose_shape, pad
from ....engine.lora import Adapter
from ....engine.runner import Pending, Replay, RunnerSpec, StepResult

if TYPE_CHECKING:
    from ..inputs import Sent
    from ..runner import TorchRunner


class FullReplay:
    """See engine.runner.Replay."""

    def __init__(self, runner: TorchRunner, frame: Sent, hidden: Tensor, replay: Callable[[], None]) -> None:
        self._runner, self._frame, self._hidden, self._replay = runner, frame, hidden, replay

    def run(self, batch: Batch) -> Pending:
        return self._runner.replayed(batch, self._frame, self._hidden, self._replay)


class Trimmed:
    """A step without the inert rows at its end."""

    def __init__(self, padded: Pending, rows: int) -> None:
        self._padded, self._rows = padded, rows

    def result(self) -> StepResult:
        found, own = self._padded.result(), slice(self._rows)
        if found.logprobs is None or found.top_tokens is None or found.top_logprobs is None:
            return StepResult(found.tokens[own])
        return StepResult(found.tokens[own], found.logprobs[own], found.top_tokens[own], found.top_logprobs[own])


class GraphRunner:
    """A runner around a runner: steps that fit a captured shape are filled up and replayed, all others run as they
    are."""

    def __init__(self, inner: TorchRunner) -> None:
        self._inner = inner
        spec = inner.spec
        # The largest first: what it needs on the way serves the smaller ones as well.
        self._replays: dict[Shape, Replay] = {
            shape: inner.capture(shape)
            for shape in sorted((Shape(rows, rows) for rows in spec.graph_rows), reverse=True)
        }

    @property
    def spec(self) -> RunnerSpec:
        return self._inner.spec

    def run(self, batch: Batch) -> Pending:
        shape = None
        if batch.num_tokens == batch.num_rows and not (batch.wants == Want.HIDDEN).any():
            shape = choose_shape(batch, self.spec.graph_rows, self.spec.graph_tokens)
        if shape is None:
            return self._inner.run(batch)
        return Trimmed(self._replays[shape].run(pad(batch, *shape, self.spec.page_size)), batch.num_rows)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._inner.load_adapter(slot, adapter)

    def close(self) -> None:
        self._replays.clear()
        self._inner.close()
