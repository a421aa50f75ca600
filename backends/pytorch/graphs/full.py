"""Decode steps captured whole: one recording for each number of rows, replayed with new numbers in the same places.

All that a step computes up to the last hidden states is in the recording: taking in carried tokens, embedding, layers,
norm. The head over the vocabulary and the draw follow as ever: they depend on what each request asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ....engine.batch import Batch
from ....engine.runner import Pending, StepResult

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
