"""Decode steps captured whole: one recording for each number of rows, replayed with new numbers in the same places.

All that a step computes is in the recording, from taking in carried tokens to keeping those that are drawn: one launch,
and one copy back. Filters that are off for a row cost it nothing, so that one recording serves all plain draws. What
rows ask for beyond (penalties, masks, log-probabilities, …) follows as ever, from the recording's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ....engine.batch import Batch
from ....engine.runner import Pending

if TYPE_CHECKING:
    from ..inputs import Sent
    from ..runner import TorchRunner


class FullReplay:
    """See engine.runner.Replay, for batches of up to as many rows as its frame has, one token each. `logits` are what a
    replay leaves, until the next one."""

    def __init__(self, runner: TorchRunner, frame: Sent, logits: Tensor, replay: Callable[[], None]) -> None:
        self._runner, self._frame, self._logits, self._replay = runner, frame, logits, replay

    def run(self, batch: Batch) -> Pending:
        return self._runner.replayed(batch, self._frame, self._logits, self._replay)
