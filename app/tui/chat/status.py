"""The status line: the state of the model and the figures of the last answer, in words, as many as fit."""

from __future__ import annotations

from dataclasses import dataclass

from ...client import LoadedModel
from ..conversation import Message
from ..segments import Segment, SegmentLine
from ..text import phrase


@dataclass(frozen=True)
class Figures:
    """The figures of the status line. None or 0: unknown."""

    state: str
    adapter: str  # the adapter and its scale as text; empty: none
    running: LoadedModel | None
    context: int
    answer: Message | None  # the last answer with token counts
    rate: float = 0.0  # tokens per second of the running answer
    unsaved: bool = False

    def segments(self) -> list[Segment]:
        """(rank, text) from left to right. If space is short, the highest ranks are dropped first."""
        segments = [
            (0, self.state),
            (1, phrase("not saved", self.unsaved)),
            (2, phrase("adapter {}", self.adapter)),
            *(_model_segments(self.running) if self.running is not None else ()),
            (3, phrase("{:.1f} tokens/s", self.rate or (self.answer and self.answer.tokens_per_second))),
        ]
        if self.answer is None:
            return [*segments, (7, phrase("context of {:,} tokens", self.context))]
        return [*segments, *self._answer_segments(self.answer)]

    def _answer_segments(self, answer: Message) -> list[Segment]:
        used = f"{answer.prompt_tokens + answer.completion_tokens:,}"
        return [
            (4, f"{used}{phrase(' of {:,}', self.context)} tokens used"),
            (5, f"first token after {seconds(answer.ttft)}"),
            (6, f"{answer.cached_tokens / answer.prompt_tokens:.0%} of the prompt reused"),
        ]


def _model_segments(model: LoadedModel) -> list[Segment]:
    cache = f"cache {model.cache_used / model.cache_tokens:.0%} full" if model.cache_tokens else ""
    form = ", ".join(filter(None, (model.dtype, model.quant)))
    return [(8, phrase("on {}", model.backend)), (9, form), (11, model.device), (10, cache)]


def seconds(duration: float) -> str:
    """A duration as text, in milliseconds below a second."""
    return f"{duration * 1000:.0f} ms" if duration < 1 else f"{duration:.1f} s"


class StatusLine(SegmentLine):
    """Shows figures."""
