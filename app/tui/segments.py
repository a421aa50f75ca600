"""A line of short texts: as many as fit into the width, the important ones first."""

from __future__ import annotations

from collections.abc import Sequence

from textual.widgets import Static

Segment = tuple[int, str]  # rank, text; the highest rank is dropped first


def fit(segments: Sequence[Segment], width: int) -> str:
    """The texts that are not empty, in order. Drops the highest ranks until the line fits into `width`."""
    visible = [segment for segment in segments if segment[1]]
    while len(visible) > 1 and len(_joined(visible)) > width:
        visible.remove(max(visible))
    return _joined(visible)[:width]


def _joined(segments: Sequence[Segment]) -> str:
    return " · ".join(words for _, words in segments)


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
