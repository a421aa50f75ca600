"""A line of short texts: as many as fit into the width, the important ones first."""

from __future__ import annotations

from collections.abc import Sequence

from textual.widgets import Static

from .text import joined

Segment = tuple[int, str]  # rank, text; the highest rank is dropped first


def fit(segments: Sequence[Segment], width: int) -> str:
    """The texts that are not empty, in order. Drops the highest ranks until the line fits into `width`."""
    rest = [segment for segment in segments if segment[1]]
    while len(line := joined(text for _, text in rest)) > width and len(rest) > 1:
        rest.remove(max(rest))
    return line[:width]


class SegmentLine(Static):
    """One line that fits its segments again after each change of the width."""

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._segments: Sequence[Segment] = ()

    def show(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self.update(fit(segments, self.content_size.width or 80), layout=False)

    def on_resize(self) -> None:
        self.update(fit(self._segments, self.content_size.width), layout=False)
