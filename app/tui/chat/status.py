"""The status line: the state of the model and the figures of the last answer, as many as fit."""

from __future__ import annotations

from dataclasses import dataclass

from textual.widgets import Static

from ...client import LoadedModel
from ..conversation import Message

Segment = tuple[int, str]  # rank, text; the highest rank is dropped first


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
            segments.append((7, f"context {self.context:,}"))
        return [segment for segment in segments if segment[1]]

    def _rate_text(self) -> str:
        """The rate of the running answer, or of the last one."""
        rate = self.rate
        if self.answer is not None and not rate:
            rate = self.answer.tokens_per_second
        return f"{rate:.1f} tok/s" if rate else ""

    def _answer_segments(self, answer: Message) -> list[Segment]:
        used = f"{answer.prompt_tokens + answer.completion_tokens:,}"
        limit = f"/{self.context:,}" if self.context else ""
        return [
            (5, f"first {seconds(answer.ttft)}"),
            (4, f"context {used}{limit}"),
            (6, f"cached {answer.cached_tokens / answer.prompt_tokens:.0%}"),
        ]


def _model_segments(model: LoadedModel) -> list[Segment]:
    cache = ""
    if model.cache_tokens:
        cache = f"kv {model.cache_used / model.cache_tokens:.0%}"
    return [(8, " ".join(filter(None, (model.backend, model.dtype, model.quant)))), (10, model.device), (9, cache)]


def seconds(duration: float) -> str:
    """A duration as text, in milliseconds below a second."""
    return f"{duration * 1000:.0f} ms" if duration < 1 else f"{duration:.1f} s"


def fit(segments: list[Segment], width: int) -> str:
    """The text of the segments, in order. Drops the highest ranks until the text fits into `width`."""
    visible = list(segments)
    while len(visible) > 1 and len(_joined(visible)) > width:
        visible.remove(max(visible))
    return _joined(visible)[:width]


def _joined(segments: list[Segment]) -> str:
    return " · ".join(words for _, words in segments)


class StatusLine(Static):
    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._segments: list[Segment] = []

    def show(self, figures: Figures) -> None:
        self._segments = figures.segments()
        self.update(fit(self._segments, self.content_size.width or 80), layout=False)

    def on_resize(self) -> None:
        self.update(fit(self._segments, self.content_size.width), layout=False)
