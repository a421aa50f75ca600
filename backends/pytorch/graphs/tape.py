"""Steps captured on a device that has no graphs: the work is done again, and its results put where they lay at first.

Nothing is gained by it but the same path through the runner: this is how the CPU tests what GPUs do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Made = TypeVar("Made")


class Tape:
    """See device.Recorder. What is recorded gives a tensor."""

    def record(self, work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        first = work()
        assert isinstance(first, Tensor)

        def replay() -> None:
            again = work()
            assert isinstance(again, Tensor)
            first.copy_(again)

        return first, replay
