"""The status line: the figures of the engine, as many as fit."""

from __future__ import annotations

from dataclasses import dataclass

from textual.widgets import Static

from ...client import LoadedModel
from ..conversation import Message


@dataclass(frozen=True)
class Figures:
    """The figures of the status line. None: unknown."""

    state: str
    running: LoadedModel | None
    context: int
    answer: Message | None
    rate: float = 0.0  # tokens per second of the running answer
    unsaved: bool = False

    def segments(self) -> list[tuple[int, str]]:
        """(rank, text) from left to right. If space is short, the highest ranks are dropped first."""
        parts = [(0, self.state)]
        if self.unsaved:
            parts.append((1, "not saved"))
        if self.running:
            parts.append((7, " ".join(filter(None, (self.running.backend, self.running.dtype, self.running.quant)))))
            parts.append((9, self.running.device))
            if self.running.cache_tokens:
                parts.append((8, f"kv {self.running.cache_used / self.running.cache_tokens:.0%}"))
        if self.rate:
            parts.append((2, f"{self.rate:.1f} tok/s"))
        if (answer := self.answer) is not None and answer.prompt_tokens:
            used = answer.prompt_tokens + answer.completion_tokens
            parts += [
                (2, f"{answer.tokens_per_second:.1f} tok/s" if answer.tokens_per_second and not self.rate else ""),
                (4, f"first {answer.ttft * 1000:.0f} ms" if answer.ttft < 1 else f"first {answer.ttft:.1f} s"),
                (3, f"context {used:,}/{self.context:,}" if self.context else f"context {used:,}"),
                (5, f"cached {answer.cached_tokens / answer.prompt_tokens:.0%}"),
            ]
        elif self.context:
            parts.append((6, f"context {self.context:,}"))
        return [(rank, words) for rank, words in parts if words]


def fit(segments: list[tuple[int, str]], width: int) -> str:
    """The segments that fit into `width`, in order. Drops the highest ranks first."""
    visible = list(segments)
    while len(visible) > 1 and len(_joined(visible)) > width:
        visible.remove(max(visible))
    return _joined(visible)[:width]


def _joined(segments: list[tuple[int, str]]) -> str:
    return " · ".join(words for _, words in segments)


class StatusLine(Static):
    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._segments: list[tuple[int, str]] = []

    def tell(self, figures: Figures) -> None:
        self._segments = figures.segments()
        self.update(fit(self._segments, self.content_size.width or 80), layout=False)

    def on_resize(self) -> None:
        self.update(fit(self._segments, self.content_size.width), layout=False)
