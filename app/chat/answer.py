"""One choice of one answer: tokens in, pieces of text, reasoning, tool calls and log-probabilities out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from ...engine.request import Delta, TokenLogprobs
from ...engine.text import TextStream
from ..frames import Piece, PieceLogprob, ToolCallPiece
from .parsers import CALL, END_CALL, END_THINK, THINK, CallPart, OutputParser, Part, ReasoningPart, TextPart
from .prompt import Prompt
from .tokenizer import ChatTokenizer

Finish = Literal["stop", "length", "tool_calls"]


class Choice:
    """Feed deltas until `done`. No piece follows; the caller cancels the engine's request if it still runs.

    Each token is reported in the piece that has its text. The final stop token, and tokens after a stop string, count
    in `generated`, but have neither text nor log-probabilities.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        tokenizer: ChatTokenizer,
        prompt: Prompt,
        *,
        stop: Iterable[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        parallel_tool_calls: bool = True,
    ) -> None:
        self._id = request_id
        self._index = index
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        marks = {tokenizer.id_of(mark) for mark in (THINK, END_THINK, CALL, END_CALL)}
        hidden = frozenset(tokenizer.special_ids - marks)
        before = prompt.ids if prompt.continues_text else ()
        self._text = TextStream(lambda ids: tokenizer.decode(ids, hidden=hidden), stop, before=before)
        self._parser = OutputParser(
            reasoning=prompt.reasoning,
            tools=prompt.tools,
            inside_reasoning=prompt.inside_reasoning,
            one_call=not parallel_tool_calls,
        )
        self._logprobs: deque[TokenLogprobs] = deque()  # of tokens whose text is not reported yet
        self.generated = 0
        self.cached = 0
        self.done = False

    def echo(self, text: str) -> Piece:
        """The prompt, as the answer's first piece."""
        return Piece(id=self._id, choice=self._index, text=text)

    def take(self, delta: Delta) -> Piece | None:
        """The new output after this delta; None if no text is complete yet."""
        if self.done:
            return None
        self.generated += len(delta.tokens)
        self.cached = delta.cached
        tokens = delta.tokens
        if delta.finish == "stop" and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]
        self._logprobs.extend(delta.logprobs[: len(tokens)])
        piece = self._text.push(tokens)
        parts = self._parser.feed(piece.text)
        ended = self._text.stopped or self._parser.over
        self.done = ended or delta.finish is not None
        count = piece.tokens
        if not self.done or delta.finish == "cancelled":
            return self._piece(parts, count, None) if parts or count else None
        if not self._parser.over:
            last = self._text.finish()
            count += last.tokens
            parts += self._parser.feed(last.text) + self._parser.finish()
        cut = delta.finish == "length" and not ended
        return self._piece(parts, count, "length" if cut else "stop")

    def _piece(self, parts: list[Part], count: int, finish: Finish | None) -> Piece:
        logprobs = [self._logprobs.popleft() for _ in range(min(count, len(self._logprobs)))]
        if finish == "stop" and self._parser.calls:
            finish = "tool_calls"
        return Piece(
            id=self._id,
            choice=self._index,
            text="".join(part.text for part in parts if isinstance(part, TextPart)),
            reasoning="".join(part.text for part in parts if isinstance(part, ReasoningPart)),
            tool_calls=[
                ToolCallPiece(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
                for part in parts
                if isinstance(part, CallPart)
            ],
            tokens=count,
            logprobs=[self._report(entry) for entry in logprobs],
            finish=finish,
        )

    def _report(self, entry: TokenLogprobs) -> PieceLogprob:
        top = [self._one(token, logprob) for token, logprob in entry.top]
        return self._one(entry.token, entry.logprob, top)

    def _one(self, token: int, logprob: float, top: Iterable[PieceLogprob] = ()) -> PieceLogprob:
        raw = self._tokenizer.token_bytes(token)
        return PieceLogprob(
            token=raw.decode("utf-8", "replace"), id=token, bytes=list(raw), logprob=logprob, top=list(top)
        )
