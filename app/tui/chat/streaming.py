"""Streaming Markdown, with a constant cost per frame.

Textual lays out the last block of a document again after each addition, and a long list or code block is one block.
So a growing text is split into segments, and each segment is a small document. When the answer ends, a split code block
becomes one document again.

    segment 1   heading, paragraphs, list items 1…9          final
    segment 2   list items 10…17, beginning of a code block  final, with a closing fence for display
    segment 3   rest of the code block so far                grows, with an opening fence for display
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

Block = Literal["", "list", "code"]  # type of the block that a cut splits; empty: none

_FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*([^`]*)$")
_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])\s+\S")


def parser() -> MarkdownIt:
    """A Markdown parser that shows HTML as text."""
    return MarkdownIt("gfm-like", {"html": False})


@dataclass(frozen=True)
class Cut:
    """A source cut into two documents that look like one document. The second starts at `offset` in the source."""

    head: str
    tail: str
    offset: int
    block: Block


@dataclass
class _Fence:
    """An open code block: the line, the indentation, the marks and the language of its fence."""

    line: int
    indentation: str
    marks: str
    language: str


@dataclass(frozen=True)
class _Position:
    """The line at which a long Markdown text is split in two, the block around this line, and the fence of this block
    if it is code."""

    line: int
    block: Block
    fence: _Fence | None = None


def split(source: str) -> Cut | None:
    """Split at the last line where the cut is invisible; None if there is no such line.

    The last line may be incomplete, so it is ignored.
    """
    lines = source.split("\n")
    position = _last_position(lines[:-1])
    if position is None:
        return None
    head = "\n".join(lines[: position.line]) + "\n"
    tail = "\n".join(lines[position.line :])
    offset = len(head)
    if position.fence is not None:
        head += position.fence.marks
        tail = f"{position.fence.marks}{position.fence.language}\n{tail}"
    return Cut(head, tail, offset, position.block)


def _last_position(lines: list[str]) -> _Position | None:
    position = None
    fence = None
    previous = "text"
    for number, line in enumerate(lines):
        if fence is None:
            position = _outside_code(number, line, previous) or position
            fence = _opened_fence(number, line)
        elif _closes(fence, line):
            fence = None
        elif not fence.indentation and number > fence.line + 1:
            position = _Position(number, "code", fence)
        previous = line
    return position


def _outside_code(number: int, line: str, previous: str) -> _Position | None:
    """A cut before a line that is not in a code block; None if the cut would be visible."""
    if number == 0:
        return None
    if previous.strip():
        return _Position(number, "list") if _ITEM.match(line) else None
    starts_block = line[:1].strip() or _ITEM.match(line)
    return _Position(number, "") if starts_block else None


def _opened_fence(number: int, line: str) -> _Fence | None:
    match = _FENCE.match(line)
    return _Fence(number, match[1], match[2], match[3]) if match else None


def _closes(fence: _Fence, line: str) -> bool:
    match = _FENCE.match(line)
    if match is None:
        return False
    return match[2].startswith(fence.marks) and not match[3].strip()


@dataclass(frozen=True)
class Segment:
    document: Markdown
    start: int  # offset of the segment in the source of the answer
    block: Block  # type of the block that the cut before the segment splits


class StreamingMarkdown(Vertical):
    """Shows a Markdown text. `write` appends to the text; `end` waits until all of it is on the screen."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source
        self._segments = [Segment(_document(source), 0, "")]
        self._tail = source  # source of the last segment
        self._pending: list[str] = []
        self._has_text = asyncio.Event()
        self._draw_lock = asyncio.Lock()
        self._flow: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        yield self._segments[0].document

    def write(self, text: str) -> None:
        self._pending.append(text)
        self._has_text.set()
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
            await self._has_text.wait()
            self._has_text.clear()
            start = clock()
            await asyncio.shield(self._flush())
            refreshed = asyncio.Event()
            self.call_after_refresh(refreshed.set)
            await refreshed.wait()
            await asyncio.sleep(max(FRAME, clock() - start))  # drawing takes at most half of the time

    async def _flush(self) -> None:
        async with self._draw_lock:  # a flush continues when its task is cancelled; `end` waits for it here
            await self._add()

    async def _add(self) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        if not text or not self.is_attached:
            return
        self._source += text
        self._tail += text
        last = self._segments[-1]
        cut = split(self._tail) if self._tail.count("\n") > SEGMENT_LINES else None
        if cut is None:
            await last.document.append(text)
            return
        start = last.start + cut.offset
        if last.block == "code":
            start -= (
                self._tail.index("\n") + 1
            )  # the fence of the segment was added for display and is not in the source
        self._tail = cut.tail
        self._segments.append(Segment(_document(cut.tail, cut.block), start, cut.block))
        last.document.set_class(bool(cut.block), f"cut-{cut.block}")
        await last.document.update(cut.head)
        await self.mount(self._segments[-1].document)

    async def _join_code(self) -> None:
        """Show each split code block as one document again: its colours depend on its first lines."""
        joined: list[Segment] = []
        ends = [segment.start for segment in self._segments[1:]] + [len(self._source)]
        for segment, end in zip(self._segments, ends, strict=True):
            if segment.block != "code":
                joined.append(segment)
                continue
            first = joined[-1]
            joined[-1] = Segment(_document(self._source[first.start : end]), first.start, first.block)
        for place, segment in enumerate(joined):
            if segment.document.is_attached:
                continue
            if place == 0:
                await self.mount(segment.document, before=0)
            else:
                await self.mount(segment.document, after=joined[place - 1].document)
        replaced = {segment.document for segment in self._segments} - {segment.document for segment in joined}
        await self.remove_children(list(replaced))
        self._segments = joined
        for segment, following in pairwise(joined):
            segment.document.set_class(following.block == "list", "cut-list")


def _document(source: str, block: Block = "") -> Markdown:
    return Markdown(source, parser_factory=parser, open_links=False, classes=f"after-{block}" if block else None)
