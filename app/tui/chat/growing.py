"""Markdown that grows while it streams, at a cost per frame that does not grow with the answer.

Textual lays out the last block of a document anew with each addition, and a long list or code block is one block.
So a growing text is cut into segments, each a small document; when the answer ends, a code block that was cut is
laid out once more in one piece.

    segment 1   heading, paragraphs, list items 1…9          settled
    segment 2   list items 10…17, beginning of a code block  settled, its fence closed for show
    segment 3   rest of the code block so far                grows, its fence opened again for show
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

FRAME = 0.05  # seconds between additions to the screen, at least
SEGMENT_LINES = 16

Inside = Literal["", "list", "code"]  # what a cut goes through

_FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*([^`]*)$")
_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])\s+\S")


def parser() -> MarkdownIt:
    """HTML is shown as the text it is, never dropped."""
    return MarkdownIt("gfm-like", {"html": False})


@dataclass(frozen=True)
class Cut:
    """Two documents that look like one, and where in the source the second begins."""

    settled: str
    growing: str
    at: int
    inside: Inside


def split(source: str) -> Cut | None:
    """Cut at the last line where it cannot be seen; None: there is none.

    The last line is taken as unfinished and never decides.
    """
    lines = source.split("\n")
    found: tuple[int, Inside, str, str] | None = None  # line, what is cut, the fence's marks and language
    fence: re.Match[str] | None = None
    opened = 0
    for number, line in enumerate(lines[:-1]):
        mark = _FENCE.match(line)
        blank_before = number > 0 and not lines[number - 1].strip()
        if fence is None:
            if number > 0 and _ITEM.match(line):
                found = number, "" if blank_before else "list", "", ""
            elif blank_before and line[:1].strip():
                found = number, "", "", ""
            fence, opened = mark, number
        elif mark and mark[2].startswith(fence[2]) and not mark[3].strip():
            fence = None
        elif not fence[1] and number > opened + 1:
            found = number, "code", fence[2], fence[3]
    if found is None:
        return None
    number, inside, marks, language = found
    head, tail = "\n".join(lines[:number]) + "\n", "\n".join(lines[number:])
    at = len(head)
    return Cut(head + marks, f"{marks}{language}\n{tail}", at, inside) if marks else Cut(head, tail, at, inside)


@dataclass(frozen=True)
class Segment:
    document: Markdown
    start: int  # in the whole source
    inside: Inside  # what the cut before it went through


class GrowingMarkdown(Vertical):
    """Shows `source`; `write` adds to it, `end` waits until all of it is on the screen."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source
        self._segments = [Segment(_document(source), 0, "")]
        self._growing = source  # what the last segment's document shows
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
            began = clock()
            await asyncio.shield(self._flush())
            shown = asyncio.Event()
            self.call_after_refresh(shown.set)
            await shown.wait()
            await asyncio.sleep(max(FRAME, clock() - began))  # at most half of the time goes into drawing

    async def _flush(self) -> None:
        async with self._drawing:  # the end does not overtake a flush that outlives its cancelled task
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
        hidden = self._growing.index("\n") + 1 if last.inside == "code" else 0  # the fence opened for show
        self._growing = cut.growing
        self._segments.append(Segment(_document(cut.growing, cut.inside), last.start + cut.at - hidden, cut.inside))
        last.document.set_class(bool(cut.inside), f"cut-{cut.inside}")
        await last.document.update(cut.settled)
        await self.mount(self._segments[-1].document)

    async def _join_code(self) -> None:
        """Colours follow from a code block's beginning, so lay out those that were cut in one piece."""
        joined: list[Segment] = []
        ends = [segment.start for segment in self._segments[1:]] + [len(self._source)]
        for segment, end in zip(self._segments, ends, strict=True):
            if segment.inside != "code":
                joined.append(segment)
                continue
            first = joined[-1]
            joined[-1] = Segment(_document(self._source[first.start : end]), first.start, first.inside)
        kept = {segment.document for segment in joined}
        for place, segment in enumerate(joined):
            if not segment.document.is_attached:
                after = joined[place - 1].document if place else None
                await (self.mount(segment.document, after=after) if after else self.mount(segment.document, before=0))
        await self.remove_children([segment.document for segment in self._segments if segment.document not in kept])
        self._segments = joined
        for segment, after_it in pairwise(joined):
            segment.document.set_class(after_it.inside == "list", "cut-list")


def _document(source: str, after: Inside = "") -> Markdown:
    return Markdown(source, parser_factory=parser, open_links=False, classes=f"after-{after}" if after else None)
