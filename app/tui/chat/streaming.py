"""Streaming Markdown, with a constant cost per frame.

Textual lays out the last block of a document again after each addition, and a long list or code block is one block.
So a growing text is split into segments, each a small document. When the answer ends, a split code block is laid out
again as one document.

    segment 1   heading, paragraphs, list items 1…9          settled
    segment 2   list items 10…17, beginning of a code block  settled, fence closed for display
    segment 3   rest of the code block so far                grows, fence opened for display
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markdown_it import MarkdownIt
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Markdown

FRAME = 0.05  # minimum seconds between updates of the screen
SEGMENT_LINES = 16

Inside = Literal["", "list", "code"]  # the block that a cut splits

_FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*([^`]*)$")
_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])\s+\S")


def parser() -> MarkdownIt:
    """A Markdown parser that shows HTML as text."""
    return MarkdownIt("gfm-like", {"html": False})


@dataclass(frozen=True)
class Cut:
    """Two documents that look like one. The second starts at `at` in the source."""

    settled: str
    growing: str
    at: int
    inside: Inside


def split(source: str) -> Cut | None:
    """Split at the last line where the cut is invisible; None if there is no such line.

    The last line may be incomplete, so it is ignored.
    """
    lines = source.split("\n")
    cut: tuple[int, Inside, str, str] | None = None  # line, block, marks and language of the fence
    fence: re.Match[str] | None = None
    opened = 0
    for number, line in enumerate(lines[:-1]):
        mark = _FENCE.match(line)
        blank_before = number > 0 and not lines[number - 1].strip()
        if fence is None:
            if number > 0 and _ITEM.match(line):
                cut = number, "" if blank_before else "list", "", ""
            elif blank_before and line[:1].strip():
                cut = number, "", "", ""
            fence = mark
            opened = number
        elif mark and mark[2].startswith(fence[2]) and not mark[3].strip():
            fence = None
        elif not fence[1] and number > opened + 1:
            cut = number, "code", fence[2], fence[3]
    if cut is None:
        return None
    number, inside, marks, language = cut
    head = "\n".join(lines[:number]) + "\n"
    tail = "\n".join(lines[number:])
    at = len(head)
    return Cut(head + marks, f"{marks}{language}\n{tail}", at, inside) if marks else Cut(head, tail, at, inside)


@dataclass(frozen=True)
class Segment:
    document: Markdown
    start: int  # offset in the whole source
    inside: Inside  # the block that the cut before it splits


class StreamingMarkdown(Vertical):
    """Shows `source`. `write` appends to it; `end` waits until all of it is on the screen."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source
        self._segments = [Segment(_document(source), 0, "")]
        self._growing = source  # source of the last segment
        self._pending: list[str] = []
        self._more = asyncio.Event()
        self._drawing = asyncio.Lock()
        self._flow: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        yield self._segments[0].document

    def write(self, text: str) -> None:
        self._pending.append(text)
        self._more.set()
        if self._flow is None:
            self._flow = asyncio.create_task(self._run())

    async def end(self) -> None:
        if self._flow is not None:
            self._flow.cancel()
            await asyncio.wait([self._flow])
            self._flow = None
            await self._flush()
            await self._join_code()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await self._more.wait()
            self._more.clear()
            start = clock()
            await asyncio.shield(self._flush())
            refreshed = asyncio.Event()
            self.call_after_refresh(refreshed.set)
            await refreshed.wait()
            await asyncio.sleep(max(FRAME, clock() - start))  # at most half of the time is drawing

    async def _flush(self) -> None:
        async with self._drawing:  # a flush may outlive its cancelled task; `end` waits for it
            await self._add()

    async def _add(self) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        if not text or not self.is_attached:
            return
        self._source += text
        self._growing += text
        last = self._segments[-1]
        cut = split(self._growing) if self._growing.count("\n") > SEGMENT_LINES else None
        if cut is None:
            await last.document.append(text)
            return
        hidden = self._growing.index("\n") + 1 if last.inside == "code" else 0  # the fence that was opened for display
        self._growing = cut.growing
        self._segments.append(Segment(_document(cut.growing, cut.inside), last.start + cut.at - hidden, cut.inside))
        last.document.set_class(bool(cut.inside), f"cut-{cut.inside}")
        await last.document.update(cut.settled)
        await self.mount(self._segments[-1].document)

    async def _join_code(self) -> None:
        """Lay out split code blocks again as one document: colours depend on the start of the block."""
        joined: list[Segment] = []
        ends = [segment.start for segment in self._segments[1:]] + [len(self._source)]
        for segment, end in zip(self._segments, ends, strict=True):
            if segment.inside != "code":
                joined.append(segment)
                continue
            first = joined[-1]
            joined[-1] = Segment(_document(self._source[first.start : end]), first.start, first.inside)
        documents = {segment.document for segment in joined}
        for place, segment in enumerate(joined):
            if not segment.document.is_attached:
                after = joined[place - 1].document if place else None
                await (self.mount(segment.document, after=after) if after else self.mount(segment.document, before=0))
        await self.remove_children(
            [segment.document for segment in self._segments if segment.document not in documents]
        )
        self._segments = joined
        for segment, after_it in pairwise(joined):
            segment.document.set_class(after_it.inside == "list", "cut-list")


def _document(source: str, after: Inside = "") -> Markdown:
    return Markdown(source, parser_factory=parser, open_links=False, classes=f"after-{after}" if after else None)
