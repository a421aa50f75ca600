"""Prefill and mixed steps, captured in segments: everything except attention and the scans of recurrent layers, which
depend on the rows.

A segment depends only on the number of tokens, padded to a bucket. At every attention or scan one segment ends and the
next begins. A replay runs the segments in order and, between two segments, the attention or the scan of the batch's
rows (SGLang's breakable graphs). Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ....engine.batch import Batch
from ....engine.runner import Pending
from ....kernels.ops import Ops
from ....kernels.ops.attention import Attend, Attention, Rows
from ....kernels.ops.scan import LayerStates, Scan, run_scan
from ....kernels.ops.state import StateRows
from ....kernels.ops.streams import IN_ORDER, Streams
from ..device import NO_ROWS, Captured, Recorder
from ..failures import failures
from ..inputs import Step
from ..runner import TorchRunner


class Break(Protocol):
    """The work between two segments."""

    def run(self, step: Step, tokens: int) -> None:
        """Compute it for a step, which has `tokens` tokens without padding."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionBreak:
    """An attention: its query, and the memory for its output."""

    attend: Callable[[Tensor, Rows, Tensor], Tensor]  # a function of query, rows and output
    query: Tensor  # [captured tokens, heads, dim]
    out: Tensor  # [captured tokens, heads, value dim]
    group: int  # the cache group of the layer

    def run(self, step: Step, tokens: int) -> None:
        """See Break."""
        self.attend(self.query[:tokens], step.places[self.group].rows, self.out[:tokens])


@dataclass(frozen=True, slots=True)
class ScanBreak:
    """The scan of a recurrent layer: its inputs, and the memory for its output."""

    scan: Scan
    inputs: tuple[Tensor, ...]  # each [captured tokens, …]
    out: Tensor  # [captured tokens, width]
    ops: Ops
    states: tuple[LayerStates, ...]

    def run(self, step: Step, tokens: int) -> None:
        """See Break."""
        inputs = tuple(each[:tokens] for each in self.inputs)
        self.out[:tokens].copy_(run_scan(self.scan, inputs, self.ops, step.state_rows, self.states))


class BreakOutputs:
    """Memory for the outputs of attention and of scans. All layers and sizes share it: a layer reads its output before
    the next layer writes."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def of(self, x: Tensor, *shape: int) -> Tensor:
        """Memory [tokens, *shape] for the output of x [tokens, …], with its dtype. The first call must have the largest
        number of tokens."""
        key = shape, x.dtype
        if key not in self._outputs:
            self._outputs[key] = x.new_zeros(x.shape[0], *shape)
        return self._outputs[key][: x.shape[0]]

    def attention(self) -> Attention:
        """Attention that computes nothing: its outputs are this memory."""

        def paged(query: Tensor, *_: Any) -> Tensor:
            return self.of(query, *query.shape[1:])

        def latent(query: Tensor, pages: tuple[Tensor, ...], rows: Rows, scale: float, start: int) -> Tensor:
            return self.of(query, query.shape[1], query.shape[2] - start)

        return Attention(paged=paged, latent=latent)

    def scan(self, scan: Scan, inputs: tuple[Tensor, ...], *_: Any) -> Tensor:
        """As scan.run_scan, but computes nothing: the output is this memory."""
        return self.of(inputs[0], scan.width)


class Segments:
    """A step captured in segments, with an attention or a scan between each two segments."""

    def __init__(self, recorder: Recorder, outputs: BreakOutputs) -> None:
        self._recorder = recorder
        self._outputs = outputs
        self._replays: list[Captured] = []
        self._breaks: list[Break] = []

    def capture(self, work: Callable[[Ops], Tensor], ops: Ops) -> Tensor:
        """Capture `work(ops)`, with a break at each attention and at each call of `scan`, and return its result."""
        attention = replace(
            ops.attention,
            paged=partial(self._break_paged, ops.attention.paged),
            latent=partial(self._break_latent, ops.attention.latent),
        )
        self._recorder.begin()
        result = work(replace(ops, attention=attention))
        self._replays.append(self._recorder.end())
        assert self._breaks, "no attention to break at: an op that computes whole layers would capture the rows"
        return result

    def replay(self, step: Step, tokens: int) -> None:
        """Run the segments, and between them the attentions and scans of a step, as in Break.run."""
        first, *others = self._replays
        first(NO_ROWS)
        for item, segment in zip(self._breaks, others, strict=True):
            item.run(step, tokens)
            segment(NO_ROWS)

    def scan(
        self,
        scan: Scan,
        inputs: tuple[Tensor, ...],
        ops: Ops,
        rows: StateRows | None,
        states: tuple[LayerStates, ...],
    ) -> Tensor:
        """As scan.run_scan, but a break of the capture."""
        out = self._outputs.of(inputs[0], scan.width)
        self._break(ScanBreak(scan, tuple(map(self._recorder.weak, inputs)), out, ops, states))
        return out

    def _break_paged(self, paged: Callable[..., Tensor], query: Tensor, rows: Rows, attend: Attend) -> Tensor:
        return self._attend(lambda query, rows, out: paged(query, rows, attend, out), query, rows, query.shape[2])

    def _break_latent(
        self,
        latent: Callable[..., Tensor],
        query: Tensor,
        pages: tuple[Tensor, ...],
        rows: Rows,
        scale: float,
        start: int,
    ) -> Tensor:
        def attend(query: Tensor, rows: Rows, out: Tensor) -> Tensor:
            return latent(query, pages, rows, scale, start, out)

        return self._attend(attend, query, rows, query.shape[2] - start)

    def _attend(
        self, attend: Callable[[Tensor, Rows, Tensor], Tensor], query: Tensor, rows: Rows, value_dim: int
    ) -> Tensor:
        out = self._outputs.of(query, query.shape[1], value_dim)
        self._break(AttentionBreak(attend, self._recorder.weak(query), out, rows.group))
        return out

    def _break(self, item: Break) -> None:
        """End the segment, and begin the next one after `item`."""
        self._replays.append(self._recorder.end())
        self._breaks.append(item)
        self._recorder.begin()


class BreakableReplay:
    """See engine.runner.Replay. It replays batches of at most `tokens` tokens in any rows. It owns its captures and the
    hidden states of the last replay, which the next replay overwrites."""

    @torch.inference_mode()
    def __init__(
        self,
        runner: TorchRunner,
        recorder: Recorder,
        tokens: int,
        outputs: BreakOutputs,
        *,
        adapted: bool = False,
        streams: Streams = IN_ORDER,
    ) -> None:
        """Captures the step. `adapted`: rows may have adapters. `streams`: the streams of the captured work; a layer
        joins them before the segment ends."""
        self._runner = runner
        step = runner.inputs.token_frame(tokens, adapted=adapted)
        self._frame = step
        ops = runner.device.ops
        with failures("capturing a step failed"), recorder.session():
            # The first call compiles and allocates.
            runner.prefill(replace(step, run_scan=outputs.scan), replace(ops, attention=outputs.attention()))
            self._segments = Segments(recorder, outputs)
            captured = replace(step, streams=streams, run_scan=self._segments.scan)
            self._hidden = self._segments.capture(partial(runner.prefill, captured), ops)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Pending:
        runner = self._runner
        with failures("the step failed"):
            runner.copy(batch)
            sent = runner.inputs.fill_tokens(batch, self._frame)
            self._segments.replay(sent.step, batch.num_tokens)
            return runner.sample(batch, sent, self._hidden[: len(sent.samples)])
