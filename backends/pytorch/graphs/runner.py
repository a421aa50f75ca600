"""A runner around a runner: steps that fit what was captured are replayed, all others run as they are."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from ....engine.batch import Batch, Want
from ....engine.graphs import Shape, choose_shape, pad
from ....engine.lora import Adapter
from ....engine.runner import Pending, Replay, RunnerSpec
from .breakable import Answers
from .full import Trimmed

if TYPE_CHECKING:
    from ..runner import TorchRunner


class GraphRunner:
    """See engine.runner.Runner. Captures what the spec names: decode steps whole, longer ones in pieces."""

    def __init__(self, inner: TorchRunner) -> None:
        self._inner = inner
        spec, answers = inner.spec, Answers()
        # The largest first: what it needs on the way serves the smaller ones as well.
        self._pieces: dict[int, Replay] = {
            tokens: inner.capture_in_pieces(tokens, answers) for tokens in reversed(spec.graph_tokens)
        }
        self._whole: dict[Shape, Replay] = {
            shape: inner.capture(shape) for shape in (Shape(rows, rows) for rows in reversed(spec.graph_rows))
        }

    @property
    def spec(self) -> RunnerSpec:
        return self._inner.spec

    def run(self, batch: Batch) -> Pending:
        spec = self._inner.spec
        if batch.num_tokens == batch.num_rows and not (batch.wants == Want.HIDDEN).any():
            shape = choose_shape(batch, spec.graph_rows, spec.graph_rows)
            if shape is not None:
                return Trimmed(self._whole[shape].run(pad(batch, *shape, spec.page_size)), batch.num_rows)
        at = bisect_left(spec.graph_tokens, batch.num_tokens)
        if at < len(spec.graph_tokens):
            return self._pieces[spec.graph_tokens[at]].run(batch)
        return self._inner.run(batch)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._inner.load_adapter(slot, adapter)

    def close(self) -> None:
        """What was captured goes first: it keeps the inner runner's memory."""
        self._whole.clear()
        self._pieces.clear()
        self._inner.close()
