"""Prefill and mixed steps, captured in segments: everything except attention, which depends on the rows.

A segment depends only on the number of tokens, padded to a bucket. At every attention one segment ends and the next
begins. A replay runs the segments in order and, between two segments, the attention of the batch's rows (SGLang's
breakable graphs). Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....engine.batch import Batch
from ....engine.runner import Pending
from ....kernels.ops import Ops
from ....kernels.ops.attention import Attend, Attention, Rows
from ....kernels.ops.step import Places
from ....kernels.ops.streams import IN_ORDER, Streams
from ..device import NO_ROWS, Captured, Recorder
from ..failures import failures
from ..runner import TorchRunner


@dataclass(frozen=True, slots=True)
class Break:
    """The attention between two segments: its query, and the memory for its output."""

    attend: Callable[[Tensor, Rows, Tensor], Tensor]  # a function of query, rows and output
    query: Tensor  # [captured tokens, heads, dim]
    out: Tensor  # [captured tokens, heads, value dim]
    group: int  # the cache group of the layer

    def run(self, places: Sequence[Places], tokens: int) -> None:
        """Compute the attention of a step with `places` in each cache group and `tokens` tokens without padding."""
        self.attend(self.query[:tokens], places[self.group].rows, self.out[:tokens])


class AttentionOutputs:
    """Memory for attention outputs. All layers and sizes share it: a layer reads its output before the next layer
    writes."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def of(self, query: Tensor, value_dim: int) -> Tensor:
        """Memory [tokens, heads, value_dim] for the output of `query`, with its dtype. The first call must have the
        largest number of tokens."""
        tokens, heads, _ = query.shape
        key = (heads, value_dim), query.dtype
        if key not in self._outputs:
            self._outputs[key] = query.new_zeros(tokens, heads, value_dim)
        return self._outputs[key][:tokens]

    def attention(self) -> Attention:
        """Attention that computes nothing: its outputs are this memory."""

        def paged(query: Tensor, *_: Any) -> Tensor:
            return self.of(query, query.shape[2])

        def latent(query: Tensor, pages: tuple[Tensor, ...], rows: Rows, scale: float, start: int) -> Tensor:
            return self.of(query, query.shape[2] - start)

        return Attention(paged=paged, latent=latent)


class Segments:
    """A step captured in segments, with an attention between each two segments."""

    def __init__(self, recorder: Recorder, outputs: AttentionOutputs) -> None:
        self._recorder = recorder
        self._outputs = outputs
        self._replays: list[Captured] = []
        self._breaks: list[Break] = []

    def capture(self, work: Callable[[Ops], Tensor], ops: Ops) -> Tensor:
        """Capture `work(ops)`, with a break at each attention, and return its result."""
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

    def replay(self, places: Sequence[Places], tokens: int) -> None:
        """Run the segments, and between them the attention of a step, as in Break.run."""
        first, *others = self._replays
        first(NO_ROWS)
        for attention, segment in zip(self._breaks, others, strict=True):
            attention.run(places, tokens)
            segment(NO_ROWS)

    def _break_paged(self, paged: Callable[..., Tensor], query: Tensor, rows: Rows, attend: Attend) -> Tensor:
        return self._break(lambda query, rows, out: paged(query, rows, attend, out), query, rows, query.shape[2])

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

        return self._break(attend, query, rows, query.shape[2] - start)

    def _break(
        self, attend: Callable[[Tensor, Rows, Tensor], Tensor], query: Tensor, rows: Rows, value_dim: int
    ) -> Tensor:
        self._replays.append(self._recorder.end())
        out = self._outputs.of(query, value_dim)
        self._breaks.append(Break(attend, self._recorder.weak(query), out, rows.group))
        self._recorder.begin()
        return out


class BreakableReplay:
    """See engine.runner.Replay. It replays batches of at most `tokens` tokens in any rows. It owns its captures and the
    hidden states of the last replay, which the next replay overwrites."""

    @torch.inference_mode()
    def __init__(
        self,
        runner: TorchRunner,
        recorder: Recorder,
        tokens: int,
        outputs: AttentionOutputs,
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
            runner.prefill(step, replace(ops, attention=outputs.attention()))  # the first call compiles and allocates
            self._segments = Segments(recorder, outputs)
            self._hidden = self._segments.capture(partial(runner.prefill, replace(step, streams=streams)), ops)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Pending:
        runner = self._runner
        with failures("the step failed"):
            runner.kv.copy(batch.page_copies, runner.device)
            sent = runner.inputs.fill_tokens(batch, self._frame)
            self._segments.replay(sent.step.places, batch.num_tokens)
            return runner.sample(batch, sent, self._hidden[: len(sent.samples)])
