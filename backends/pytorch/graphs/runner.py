"""A runner that wraps another runner. It replays steps that fit a captured size and runs others without graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ....engine.batch import Batch, Want
from ....engine.errors import OutOfMemory
from ....engine.graphs import bucket
from ....engine.lora import Adapter
from ....engine.runner import Pending, Replay, RunnerSpec
from ....kernels.ops.streams import IN_ORDER
from ..device import Recorder
from ..inputs import Inputs
from ..runner import TorchRunner
from .breakable import BreakableReplay, BreakOutputs
from .full import FullReplay
from .parallel import ParallelExperts, SharedExperts

log = logging.getLogger(__name__)

HIDDEN = int(Want.HIDDEN)  # comparing an int is faster than comparing an enum member


class GraphRunner:
    """A runner that replays captured steps (engine.runner.Runner). It captures the sizes in the spec of `inner`: decode
    steps as one graph, longer steps in segments. Its `spec` lists the captured sizes: memory may limit them."""

    def __init__(self, inner: TorchRunner, recorder: Recorder, experts: SharedExperts | None = None) -> None:
        """`experts`: the layers whose shared expert a second stream may compute; None: no layer."""
        self._inner = inner
        self._recorder = recorder
        spec = inner.spec
        self._outputs = BreakOutputs()
        self._parallel = ParallelExperts(inner.device, experts)
        start = time.perf_counter()
        self._prefills = _captured(spec.graph_tokens, self._capture_prefill)
        self._decodes = _captured(spec.graph_rows, self._capture_decode)
        self._adapted_prefills = Captures(inner.inputs, partial(self._capture_prefill, adapted=True))
        self._adapted_decodes = Captures(inner.inputs, partial(self._capture_decode, adapted=True))
        self.capture_seconds = time.perf_counter() - start
        # The numbers of tokens whose captured steps use a second stream.
        self.second_queue_tokens = self._parallel.second_queue_tokens()
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

    def _capture_prefill(self, tokens: int, *, adapted: bool = False) -> BreakableReplay:
        inner = self._inner
        is_compiled = inner.split is not None and not adapted  # compiled segments run on one stream
        streams = IN_ORDER if is_compiled else self._parallel.streams(tokens)
        return BreakableReplay(inner, self._recorder, tokens, self._outputs, adapted=adapted, streams=streams)

    def _capture_decode(self, rows: int, *, adapted: bool = False) -> FullReplay:
        return FullReplay(self._inner, self._recorder, rows, adapted=adapted, streams=self._parallel.streams(rows))

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def run(self, batch: Batch) -> Pending:
        replay = self._find_replay(batch)
        return self._inner.run(batch) if replay is None else replay.run(batch)

    def _find_replay(self, batch: Batch) -> Replay | None:
        """The captured step for this batch. None: it runs without graphs."""
        spec = self._spec
        adapted = batch.adapters.any()
        if batch.num_tokens == batch.num_rows and not (batch.wants == HIDDEN).any():
            rows = bucket(batch.num_rows, spec.graph_rows)
            if rows is not None:
                return self._adapted_decodes.find(rows) if adapted else self._decodes[rows]
        tokens = bucket(batch.num_tokens, spec.graph_tokens)
        if tokens is None:
            return None
        return self._adapted_prefills.find(tokens) if adapted else self._prefills[tokens]

    def prepare_adapter(self, adapter: Adapter) -> None:
        self._inner.prepare_adapter(adapter)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._inner.load_adapter(slot, adapter)

    def forget_adapter(self, adapter: Adapter) -> None:
        self._inner.forget_adapter(adapter)

    def close(self) -> None:
        """Free the captures, which reference the memory of the inner runner, then close that runner."""
        self._decodes.clear()
        self._adapted_decodes.clear()
        self._adapted_prefills.clear()
        self._prefills.clear()
        self._parallel.close()
        self._inner.close()


class Captures:
    """Steps with adapters. A size is captured at its first step, so the load of an adapter stops no other request."""

    def __init__(self, inputs: Inputs, capture: Callable[[int], Replay]) -> None:
        self._inputs = inputs
        self._capture = capture
        self._replays: dict[int, Replay | None] = {}

    def find(self, size: int) -> Replay | None:
        """The replay of a size. None: its capture does not fit in memory."""
        if size not in self._replays:
            self._replays[size] = None
            with self._inputs.preserved(), suppress(OutOfMemory):
                self._replays[size] = self._capture(size)
        return self._replays[size]

    def clear(self) -> None:
        self._replays.clear()


def _captured(sizes: Sequence[int], capture: Callable[[int], Replay]) -> dict[int, Replay]:
    """Size -> its replay, for each size whose capture fits in memory."""
    replays = {}
    for size in reversed(sizes):  # the largest first: smaller sizes reuse its memory
        with suppress(OutOfMemory):
            replays[size] = capture(size)
    return replays
