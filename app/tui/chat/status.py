"""The bottom line: the engine's figures, as many as fit."""

from __future__ import annotations

from dataclasses import dataclass

from textual.widgets import Static

from ...client import LoadedModel
from ..conversation import Message


@dataclass(frozen=True)
class Figures:
    """What the line may show. None: nothing to say yet."""

    state: str
    running: LoadedModel | None
    context: int
    answer: Message | None
    rate: float = 0.0  # tokens per second of the running answer
    unsaved: bool = False

    def segments(self) -> list[tuple[int, str]]:
        """Pieces from left to right, each with its rank: the highest ranks go first when room is short."""
        found = [(0, self.state)]
        if self.unsaved:
            found.append((1, "not saved"))
        if self.running:
            found.append((7, " ".join(filter(None, (self.running.backend, self.running.dtype, self.running.quant)))))
            found.append((9, self.running.device))
            if self.running.cache_tokens:
                found.append((8, f"kv {self.running.cache_used / self.running.cache_tokens:.0%}"))
        if self.rate:
            found.append((2, f"{self.rate:.1f} tok/s"))
        if (answer := self.answer) is not None and answer.prompt_tokens:
            used = answer.prompt_tokens + answer.completion_tokens
            found += [
                (2, f"{answer.tokens_per_second:.1f} tok/s" if answer.tokens_per_second and not self.rate else ""),
                (4, f"first {answer.ttft * 1000:.0f} ms" if answer.ttft < 1 else f"first {answer.ttft:.1f} s"),
                (3, f"context {used:,}/{self.context:,}" if self.context else f"context {used:,}"),
                (5, f"cached {answer.cached_tokens / answer.prompt_tokens:.0%}"),
            ]
        elif self.context:
            found.append((6, f"context {self.context:,}"))
        return [(rank, words) for rank, words in found if words]


def fit(segments: list[tuple[int, str]], width: int) -> str:
    """The segments that fit into `width`, in their order, the least important left out first."""
    kept = list(segments)
    while len(kept) > 1 and len(_joined(kept)) > width:
        kept.remove(max(kept))
    return _joined(kept)[:width]


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
