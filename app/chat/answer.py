"""Converts the tokens of one choice to text, reasoning, tool calls and log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from ...engine.request import Delta, TokenLogprobs
from ...engine.text import TextStream
from ..frames import Piece, PieceLogprob, ToolCallPiece
from .parsers import CALL, END_CALL, END_THINK, THINK, Output, OutputParser
from .prompt import Prompt
from .tokens import Tokenizer

Finish = Literal["stop", "length", "tool_calls"]


class Choice:
    """Call `take` with each delta until `done`. Then the caller cancels the engine's request if it still runs.

    Each token is reported in the piece that has its text. The final stop token, and tokens after a stop string, count
    in `generated`, but have neither text nor log-probabilities.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        tokenizer: Tokenizer,
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
        markers = {tokenizer.id_of(marker) for marker in (THINK, END_THINK, CALL, END_CALL)}
        hidden = frozenset(tokenizer.special_ids - markers)
        before = prompt.ids if prompt.continues_text else ()
        self._text = TextStream(lambda ids: tokenizer.decode(ids, hidden=hidden), stop, before=before)
        self._parser = OutputParser(
            reasoning=prompt.reasoning,
            tools=prompt.tools,
            inside_reasoning=prompt.inside_reasoning,
            one_call=not parallel_tool_calls,
        )
        self._logprobs: deque[TokenLogprobs] = deque()  # log-probabilities of tokens whose text is not reported yet
        self.generated = 0
        self.cached = 0
        self.done = False

    def echo(self, text: str) -> Piece:
        """The first piece of an answer that repeats the prompt."""
        return Piece(id=self._id, choice=self._index, text=text)

    def take(self, delta: Delta) -> Piece | None:
        """The new output after this delta; None if no text is complete yet, and after the last piece."""
        if self.done:
            return None
        self.generated += len(delta.tokens)
        self.cached = delta.cached
        tokens = self._tokens_with_text(delta)
        self._logprobs.extend(delta.logprobs[: len(tokens)])
        piece = self._text.push(tokens)
        self._parser.feed(piece.text)
        ended = self._text.stopped or self._parser.ended
        self.done = ended or delta.finish is not None
        if self.done and delta.finish != "cancelled":
            reached_limit = delta.finish == "length" and not ended
            return self._last_piece(piece.tokens, "length" if reached_limit else "stop")
        output = self._parser.take()
        if output == Output() and not piece.tokens:
            return None
        return self._piece(output, piece.tokens, None)

    def _tokens_with_text(self, delta: Delta) -> tuple[int, ...]:
        """The tokens of a delta, without a stop token at the end of the answer."""
        if delta.finish == "stop" and self._stop_ids.issuperset(delta.tokens[-1:]):
            return delta.tokens[:-1]
        return delta.tokens

    def _last_piece(self, count: int, finish: Finish) -> Piece:
        if not self._parser.ended:
            last = self._text.finish()
            count += last.tokens
            self._parser.feed(last.text)
            self._parser.finish()
        if finish == "stop" and self._parser.calls:
            finish = "tool_calls"
        return self._piece(self._parser.take(), count, finish)

    def _piece(self, output: Output, count: int, finish: Finish | None) -> Piece:
        """`count`: number of tokens whose text is in the piece."""
        logprobs = [self._logprobs.popleft() for _ in range(min(count, len(self._logprobs)))]
        return Piece(
            id=self._id,
            choice=self._index,
            text=output.text,
            reasoning=output.reasoning,
            tool_calls=[
                ToolCallPiece(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
                for call in output.calls
            ],
            tokens=count,
            logprobs=[self._report(entry) for entry in logprobs],
            finish=finish,
        )

    def _report(self, entry: TokenLogprobs) -> PieceLogprob:
        top = [self._logprob(token, logprob) for token, logprob in entry.top]
        return self._logprob(entry.token, entry.logprob, top)

    def _logprob(self, token: int, logprob: float, top: Iterable[PieceLogprob] = ()) -> PieceLogprob:
        raw = self._tokenizer.token_bytes(token)
        return PieceLogprob(
            token=raw.decode("utf-8", "replace"), id=token, bytes=list(raw), logprob=logprob, top=list(top)
        )
