"""The parts of an answer in the order in which they begin: reasoning, text, and each tool call.

Some protocols answer with a list of items or blocks, one for each part. The start of a part ends the part before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..errors import AppError
from ..frames import Piece, PieceLogprob, ToolCallPiece

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Part:
    """One part. `new`: what the last piece added to it."""

    kind: Kind
    index: int  # place in the answer
    call_id: str = ""
    name: str = ""  # of the called function
    new: str = ""
    new_logprobs: list[PieceLogprob] = field(default_factory=list)  # of a text
    logprobs: list[PieceLogprob] = field(default_factory=list)
    is_closed: bool = False
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; of a call, its arguments."""
        return "".join(self._texts)

    def add(self, text: str, logprobs: list[PieceLogprob] | None = None) -> None:
        self.new = text
        self.new_logprobs = logprobs or []
        self._texts.append(text)
        self.logprobs += self.new_logprobs


Event = tuple[Literal["begin", "add", "end"], Part]


class Parts:
    """The parts of one answer. Call `take` with each piece, and `close` after the last one."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.finish = ""  # as in Piece; empty: the answer has not ended
        self.stop = ""  # the stop string that ended the answer
        self.reasoning_tokens = 0
        self._calls: dict[int, Part] = {}

    def take(self, piece: Piece) -> Iterator[Event]:
        """The changes of the parts by a piece, in order."""
        self.finish = piece.finish or self.finish
        self.stop = piece.stop or self.stop
        if piece.reasoning:
            self.reasoning_tokens += piece.tokens
            yield from self._add("reasoning", piece.reasoning)
        if piece.text:
            yield from self._add("text", piece.text, piece.logprobs)
        for call in piece.tool_calls:
            yield from self._add_to_call(call)

    def close(self) -> Iterator[Event]:
        """End the last part. Raises AppError if the answer has no finish reason, which a worker must always send."""
        if not self.finish:
            raise AppError("the engine ended an answer without a finish reason")
        yield from self._end()

    def _add(self, kind: Kind, text: str, logprobs: list[PieceLogprob] | None = None) -> Iterator[Event]:
        if not self.parts or self.parts[-1].kind != kind:
            yield from self._begin(Part(kind, len(self.parts)))
        self.parts[-1].add(text, logprobs)
        yield "add", self.parts[-1]

    def _add_to_call(self, call: ToolCallPiece) -> Iterator[Event]:
        part = self._calls.get(call.index)
        if part is None:
            part = self._calls[call.index] = Part("call", len(self.parts), call.id, call.name)
            yield from self._begin(part)
        if part.is_closed:
            raise AppError("the engine continued a tool call after its end")
        if call.arguments:
            part.add(call.arguments)
            yield "add", part

    def _begin(self, part: Part) -> Iterator[Event]:
        yield from self._end()
        self.parts.append(part)
        yield "begin", part

    def _end(self) -> Iterator[Event]:
        if self.parts and not self.parts[-1].is_closed:
            self.parts[-1].is_closed = True
            yield "end", self.parts[-1]
