"""A runner that wraps another runner. It replays steps that fit a captured size and runs others without graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from ....engine.batch import Batch, Want
from ....engine.errors import OutOfMemory
from ....engine.graphs import bucket
from ....engine.lora import Adapter
from ....engine.runner import Pending, Replay, RunnerSpec
from ..runner import TorchRunner
from .breakable import AttentionOutputs, BreakableReplay
from .full import FullReplay

log = logging.getLogger(__name__)

HIDDEN = int(Want.HIDDEN)  # comparing an int is faster than comparing an enum member


class GraphRunner:
    """A runner that replays captured steps (engine.runner.Runner). It captures the sizes in the spec of `inner`: decode
    steps as one graph, longer steps in segments. Its `spec` lists the captured sizes: memory may limit them."""

    def __init__(self, inner: TorchRunner) -> None:
        self._inner = inner
        spec = inner.spec
        outputs = AttentionOutputs()
        start = time.perf_counter()
        self._prefills = _captured(spec.graph_tokens, lambda tokens: BreakableReplay(inner, tokens, outputs))
        self._decodes = _captured(spec.graph_rows, lambda rows: FullReplay(inner, rows))
        self._adapted: dict[int, Replay] = {}  # decode steps with adapters
        self.capture_seconds = time.perf_counter() - start
        sizes = len(spec.graph_tokens) + len(spec.graph_rows)
        missing = sizes - len(self._prefills) - len(self._decodes)
        self._spec = spec
        if missing:
            effect = "those steps run without graphs (slower)"
            warning = f"not enough memory to capture {missing} of {sizes} graph sizes; {effect}"
            log.warning("%s", warning)
            self._spec = replace(
                spec,
                graph_rows=tuple(sorted(self._decodes)),
                graph_tokens=tuple(sorted(self._prefills)),
                warnings=(*spec.warnings, warning),
            )

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def run(self, batch: Batch) -> Pending:
        spec = self._spec
        adapted = bool(batch.adapters.any())
        if batch.num_tokens == batch.num_rows and not (batch.wants == HIDDEN).any():
            replays = self._adapted if adapted else self._decodes
            rows = bucket(batch.num_rows, spec.graph_rows)
            if rows is not None and rows in replays:
                return replays[rows].run(batch)
        if adapted:
            return self._inner.run(batch)
        tokens = bucket(batch.num_tokens, spec.graph_tokens)
        if tokens is not None:
            return self._prefills[tokens].run(batch)
        return self._inner.run(batch)

    def prepare_adapter(self, adapter: Adapter) -> None:
        self._inner.prepare_adapter(adapter)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """The first adapter captures the decode steps with adapters."""
        self._inner.load_adapter(slot, adapter)
        if not self._adapted:
            with self._inner.inputs.preserved():
                self._adapted = _captured(
                    self._spec.graph_rows, lambda rows: FullReplay(self._inner, rows, adapted=True)
                )

    def forget_adapter(self, adapter: Adapter) -> None:
        self._inner.forget_adapter(adapter)

    def close(self) -> None:
        """Free the captures, which reference the memory of the inner runner, then close that runner."""
        self._decodes.clear()
        self._adapted.clear()
        self._prefills.clear()
        self._inner.close()


def _captured(sizes: Sequence[int], capture: Callable[[int], Replay]) -> dict[int, Replay]:
    """A replay for each size whose capture fits in memory."""
    replays = {}
    for size in reversed(sizes):  # the largest first: smaller sizes reuse its memory
        with suppress(OutOfMemory):
            replays[size] = capture(size)
    return replays
