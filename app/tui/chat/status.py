"""The status line: the state of the model and the figures of the last answer, in words, as many as fit."""

from __future__ import annotations

from dataclasses import dataclass

from ...client import LoadedModel
from ..conversation import Message
from ..segments import Segment, SegmentLine


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
        segments = [(0, self.state), (1, "not saved" if self.unsaved else "")]
        segments.append((2, self.adapter and f"adapter {self.adapter}"))
        if self.running is not None:
            segments += _model_segments(self.running)
        segments.append((3, self._rate_text()))
        if self.answer is not None:
            segments += self._answer_segments(self.answer)
        elif self.context:
            segments.append((7, f"context of {self.context:,} tokens"))
        return segments

    def _rate_text(self) -> str:
        """The rate of the running answer, or of the last one."""
        rate = self.rate
        if self.answer is not None and not rate:
            rate = self.answer.tokens_per_second
        return f"{rate:.1f} tokens/s" if rate else ""

    def _answer_segments(self, answer: Message) -> list[Segment]:
        used = f"{answer.prompt_tokens + answer.completion_tokens:,}"
        limit = f" of {self.context:,}" if self.context else ""
        return [
            (4, f"{used}{limit} tokens used"),
            (5, f"first token after {seconds(answer.ttft)}"),
            (6, f"{answer.cached_tokens / answer.prompt_tokens:.0%} of the prompt reused"),
        ]


def _model_segments(model: LoadedModel) -> list[Segment]:
    cache = ""
    if model.cache_tokens:
        cache = f"cache {model.cache_used / model.cache_tokens:.0%} full"
    form = ", ".join(filter(None, (model.dtype, model.quant)))
    return [(8, f"on {model.backend}" if model.backend else ""), (9, form), (11, model.device), (10, cache)]


def seconds(duration: float) -> str:
    """A duration as text, in milliseconds below a second."""
    return f"{duration * 1000:.0f} ms" if duration < 1 else f"{duration:.1f} s"


class StatusLine(SegmentLine):
    """Shows figures."""
