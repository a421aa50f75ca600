"""Splits the streamed text of a model into answer, reasoning and tool calls.

Reasoning is at the start of an answer, between two markers such as `<think>` and `</think>`. Tool calls may be anywhere
after it; `calls/records.py` has their formats. A marker may be split over any number of chunks of text.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...frames import ToolCallPiece
from ..calls.reading import Calls, GroupReader, Watch
from ..calls.records import CallFormat, Reasoning, Wrapper
from ..calls.source import NotACall, Source, Steps, partial_start
from ..calls.values import Tools

_SPACE = " \t\r\n"


@dataclass(slots=True)
class Output:
    """New text of an answer, new reasoning and new parts of tool calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)

    def add(self, later: Output) -> None:
        """Add the output that follows. A call has one part with all its new arguments."""
        self.text += later.text
        self.reasoning += later.reasoning
        for part in later.calls:
            if self.calls and self.calls[-1].index == part.index:
                self.calls[-1].arguments += part.arguments
            else:
                self.calls.append(part)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a model's answers."""

    reasoning: Reasoning | None = None
    calls: tuple[CallFormat, ...] = ()  # the formats that are read; the first is the one that the model was taught
    wrappers: tuple[Wrapper, ...] = ()

    @property
    def texts(self) -> list[str]:
        """All texts that the parser acts on."""
        pairs: list[Reasoning | Wrapper] = [*self.wrappers]
        if self.reasoning:
            pairs.append(self.reasoning)
        texts = [text for pair in pairs for text in (pair.begin, pair.end)]
        return texts + [text for form in self.calls for text in form.texts]


def new_id(index: int, name: str) -> str:
    """An id for a call."""
    return f"call_{secrets.token_hex(12)}"


def ignore(form: CallFormat, name: str, rest: str) -> None:
    """The watcher that nobody needs."""


class OutputParser:
    """Call `feed` with each new text of the model and `finish` after the last one. `take` returns the new output.

    The name of a call is reported at once, and its arguments as they come. The start of a marker that does not
    complete, and markup that is no call, become text. The parser drops only markers, and white space beside them.
    """

    def __init__(
        self,
        form: AnswerFormat,
        tools: Sequence[dict[str, Any]] = (),
        *,
        inside_reasoning: bool = False,
        one_call: bool = False,
        new_id: Callable[[int, str], str] = new_id,
        watch: Watch = ignore,
    ) -> None:
        """`tools`: those of the request; without tools, calls are text. `inside_reasoning`: the prompt ends inside
        reasoning. `one_call`: drop text after the first call. `watch`: called where calls begin."""
        self._form = form
        self._source = Source()
        self._calls = Calls(new_id)
        known = Tools(tools)
        formats = form.calls if tools else ()
        self._readers = [
            (item, GroupReader(item, self._source, self._calls, known, watch, one_call=one_call)) for item in formats
        ]
        self._ends = {wrapper.end for wrapper in form.wrappers if not wrapper.begin}  # texts to drop
        self._triggers = {word for item in formats for word in (item.trigger, item.call_trigger) if word}
        self._one_call = one_call
        self._output = Output()
        self._space = ""  # white space that is dropped if a call follows
        self._has_text = False
        self.in_calls = False  # the text so far ends inside a group of calls
        self.ended = False  # `one_call` is set and the first call is complete; the parser drops the text that follows
        self._steps = self._answer(inside_reasoning)
        self._advance()

    @property
    def calls(self) -> int:
        """Number of tool calls so far."""
        return self._calls.count

    @property
    def text(self) -> str:
        """The text of the answer since the last call of `take`."""
        return self._output.text

    @property
    def pending(self) -> int:
        """Number of characters of the text that are in no output yet."""
        return len(self._source.rest) + len(self._space)

    def take(self) -> Output:
        """The output since the last call of `take`."""
        output = self._output
        output.calls = self._calls.parts
        self._output = Output()
        self._calls.parts = []
        return output

    def feed(self, text: str) -> None:
        self._source.rest += text
        self._advance()

    def finish(self, *, cut: bool = False) -> None:
        """End the text: nothing stays pending. A call that lacks its end counts as a call. `cut`: the answer reached
        its maximum length, and the start of a call without a name is dropped."""
        self._source.ended = True
        self._source.cut = cut
        self._advance()

    def _advance(self) -> None:
        if not self.ended:
            next(self._steps, None)

    def _answer(self, inside_reasoning: bool) -> Steps[None]:
        reasoning = self._form.reasoning
        if reasoning is not None and (inside_reasoning or (yield from self._opens(reasoning))):
            yield from self._reasoning(reasoning)
        yield from self._open_wrappers()
        yield from self._calls_at_start()
        while not self.ended and (yield from self._text()):
            pass
        self._source.rest = ""

    def _opens(self, reasoning: Reasoning) -> Steps[bool]:
        """Take the opening marker of reasoning, and the white space before it."""
        words = reasoning.begin.split()
        return bool(words) and (yield from self._source.accept(reasoning.begin))

    def _reasoning(self, reasoning: Reasoning) -> Steps[None]:
        """Read reasoning up to its closing marker, without the white space around it."""
        source = self._source
        yield from source.skip_space()
        held = ""

        def emit(text: str) -> None:
            nonlocal held
            text = held + text
            thought = text.rstrip()
            held = text[len(thought) :]
            self._output.reasoning += thought

        if (yield from source.until(reasoning.end, emit)):
            yield from source.skip_space()
        elif self._output.reasoning:
            self._output.reasoning += held

    def _open_wrappers(self) -> Steps[None]:
        """Take the texts that open the answer."""
        for wrapper in self._form.wrappers:
            if wrapper.begin and (yield from self._source.accept(wrapper.begin)):
                yield from self._source.skip_space()
                if not (wrapper.end and (yield from self._source.accept(wrapper.end))):
                    self._ends |= {wrapper.end} - {""}

    def _calls_at_start(self) -> Steps[None]:
        """Read a group of calls in a format without markers."""
        source = self._source
        for item, reader in self._readers:
            if not item.at_start:
                continue
            while not source.rest.strip() and (yield from source.more()):
                pass
            if (yield from self._group(reader)):
                return

    def _group(self, reader: GroupReader) -> Steps[bool]:
        """Read a group of calls. False if the text is no call, or the start of one that the limit of the answer cut."""
        self._source.mark()
        before = self._calls.count
        self.in_calls = True
        try:
            yield from reader.read()
        except NotACall:
            self._source.rewind()
            if self._source.cut and self._source.starved and reader.is_start(self._source.rest):
                self._source.rest = ""
        self._source.commit()
        self.in_calls = False
        is_call = self._calls.count > before
        self.ended = is_call and self._one_call
        if is_call:
            self._space = self._space if self._has_text else ""
        return is_call

    def _text(self) -> Steps[bool]:
        """Read text up to the next marker, and the part that the marker begins. False at the end of the text."""
        source = self._source
        markers = self._triggers | self._ends
        found = [(index, marker) for marker in markers if (index := source.rest.find(marker)) >= 0]
        if found:
            index, marker = min(found, key=lambda item: (item[0], len(item[1])))
            self._write(source.take(index))
            yield from self._marker(marker)
            return True
        self._write(source.take(partial_start(source.rest, markers)))
        if (yield from source.more()):
            return True
        self._write(source.take(len(source.rest)))
        if not self.calls:
            self._output.text += self._space
        self._space = ""
        return False

    def _marker(self, marker: str) -> Steps[None]:
        """Read the part that a marker begins: a group of calls, a text to drop, or text."""
        source = self._source
        for item, reader in self._readers:
            is_known = any(word.startswith(marker) for word in (item.trigger, item.call_trigger))
            if is_known and (yield from self._group(reader)):
                return
        if marker in self._ends:
            source.take(len(marker))
        else:
            self._write(source.take(len(marker)))

    def _write(self, text: str) -> None:
        """Add text to the answer. White space at its end waits: it is dropped if calls follow and no text."""
        if not text:
            return
        if not self._readers:
            self._output.text += text
            return
        text = self._space + text
        if self.calls and not self._has_text:
            text = text.lstrip(_SPACE)
        visible = text.rstrip(_SPACE)
        self._space = text[len(visible) :]
        self._has_text = self._has_text or bool(visible)
        self._output.text += visible
