"""Decode steps, captured as one graph for each number of rows. A replay reads new values at the same addresses.

The capture has all work of a step, from the carried tokens to the draw, so a step is one launch and one copy back to
the host. Sampling filters that are off cost nothing, so one capture serves all values of the settings. Biases,
penalties, masks and log-probabilities are computed after the replay, from its logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....engine.batch import Batch, Ints
from ....engine.runner import Pending
from ....kernels.ops.streams import IN_ORDER, Streams
from ..device import Recorder
from ..failures import failures
from ..runner import TorchPending, TorchRunner
from ..sampler import Drawn, draw_plainly, is_plain, sample


class _Samples(NamedTuple):
    """The rows that draw a token or give a hidden state. Cached for batches with the same arrays: the engine reuses
    its arrays while the same rows decode."""

    wants: NDArray[np.uint8]
    drafts: Ints
    starts: Ints  # Batch.sample_starts
    rows: NDArray[np.int64] | None  # the rows that draw a token or give a hidden state; None: all rows

    @classmethod
    def of(cls, batch: Batch) -> _Samples:
        rows = batch.wants.nonzero()[0]
        return cls(batch.wants, batch.drafts, batch.sample_starts, rows if len(rows) < batch.num_rows else None)


class FullReplay:
    """See engine.runner.Replay. It replays batches of at most `rows` rows with one token each. It owns the frame, which
    a batch is copied to, and the logits of the last replay, which the next replay overwrites."""

    @torch.inference_mode()
    def __init__(
        self,
        runner: TorchRunner,
        recorder: Recorder,
        rows: int,
        *,
        adapted: bool = False,
        streams: Streams = IN_ORDER,
    ) -> None:
        """Captures the step. `adapted`: rows may have adapters. `streams`: the streams of the captured work."""
        self._runner = runner
        self._frame = runner.inputs.frame(rows, adapted=adapted)
        self._samples: _Samples | None = None  # of the previous step
        with failures("capturing a step failed"), recorder.session():
            self._work(IN_ORDER)  # the first call compiles, loads and allocates, which a capture does not allow
            recorder.begin()
            logits = self._work(streams)
            self._replay = recorder.end()
            self._logits = recorder.weak(logits)

    def _work(self, streams: Streams) -> Tensor:
        runner = self._runner
        frame = self._frame
        step = replace(frame.step, streams=streams)
        ops = runner.device.ops
        runner.inputs.carry(frame)
        logits = runner.model.logits(runner.model(step, ops, runner.kv), ops, step.sample_adapters)
        runner.inputs.keep(frame, draw_plainly(logits, frame.settings, runner.device))
        return logits

    @torch.inference_mode()
    def run(self, batch: Batch) -> Pending:
        runner = self._runner
        with failures("the step failed"):
            runner.copy(batch)
            contexts = runner.inputs.fill(batch, len(self._frame.samples))
            if self._frame.step.adapters is not None:
                runner.inputs.adapters.fill(batch, self._frame.step.adapters)
            self._replay(contexts)
            rows = batch.num_rows
            samples = self._samples
            if samples is None or samples.wants is not batch.wants or samples.drafts is not batch.drafts:
                samples = _Samples.of(batch)
                self._samples = samples
            if is_plain(batch):
                drawn = Drawn(runner.inputs.drawn(rows), None)
                return TorchPending(samples.starts, drawn, None, runner.device, samples=samples.rows)
            sent = self._frame.first(rows)
            logits = self._logits[:rows]
            if samples.rows is not None:
                sent = sent.with_samples(samples.rows, runner.device.send(samples.rows))
                logits = logits[sent.sample_rows]
            drawn = sample(logits, batch, sent, runner.device)
            runner.inputs.keep(sent, drawn.tokens)
            return TorchPending(samples.starts, drawn, None, runner.device)
