"""Converts the tokens of one choice to text, reasoning, tool calls and log-probabilities."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from msgspec.structs import replace

from ...engine.request import Delta, TokenLogprobs
from ...engine.text import StopFilter, TextStream
from ..frames import Piece, PieceLogprob
from .calls.reading import Watch
from .calls.records import MARKERS
from .output.harmony import HarmonyReader
from .output.parser import AnswerFormat, Output, OutputParser, ignore, new_id
from .prompt import Prompt
from .tokenizer.base import Tokenizer

Finish = Literal["stop", "length", "tool_calls"]


class MarkedReader:
    """Reads answers with markers such as `<think>` (see output/parser.py). It has the interface of HarmonyReader. Stop
    strings end the visible answer only."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, options: ReadingOptions, watch: Watch = ignore) -> None:
        """`watch`: called where calls begin."""
        hidden = hidden_ids(tokenizer, prompt.form)
        before = prompt.ids if prompt.continues_text else ()
        self._text = TextStream(lambda ids: tokenizer.decode(ids, hidden=hidden), before=before)
        self._stops = StopFilter(options.stop)
        self._output = Output()
        self._parser = OutputParser(
            prompt.form,
            options.tools,
            inside_reasoning=prompt.inside_reasoning,
            one_call=options.one_call,
            new_id=options.new_id,
            watch=watch,
        )

    @property
    def calls(self) -> int:
        return self._parser.calls

    @property
    def ended(self) -> bool:
        return self._stops.stopped or self._parser.ended

    @property
    def stop(self) -> str:
        """The stop string that ended the answer; empty: none."""
        return self._stops.stop

    @property
    def in_calls(self) -> bool:
        """Whether the text so far ends inside a group of calls."""
        return self._parser.in_calls

    @property
    def is_complete(self) -> bool:
        """Whether the text so far ends with a complete character."""
        return self._text.is_complete

    def take(self) -> Output:
        output = self._output
        self._output = Output()
        return output

    def push(self, tokens: Sequence[int]) -> int:
        count = 0
        for token in tokens:
            if self.ended:
                break
            self._parser.feed(self._text.push([token]))
            self._filter()
            count += self._text.settle(0 if self.ended else self._parser.pending + self._stops.held)
        return count

    def finish(self, *, cut: bool) -> int:
        if not self.ended:
            self._parser.feed(self._text.finish())
            self._parser.finish(cut=cut)
            self._filter()
        self._output.text += self._stops.finish()
        return self._text.settle()

    def _filter(self) -> None:
        """Pass the output of the parser on, up to a stop string."""
        new = self._parser.take()
        new.text = self._stops.feed(new.text)
        self._output.add(new)


@dataclass(frozen=True)
class ReadingOptions:
    """The options of a request that its reader needs. `one_call`: end the answer after the first call."""

    stop: Sequence[str] = ()
    tools: Sequence[dict[str, Any]] = ()
    one_call: bool = False
    new_id: Callable[[int, str], str] = new_id


@lru_cache(maxsize=16)
def hidden_ids(tokenizer: Tokenizer, form: AnswerFormat) -> frozenset[int]:
    """The control tokens that no answer shows. Shown are those of the markers of the format, and other markers of
    answers, such as <think> after a raw prompt, unless the files of the model declare them as special."""
    texts = form.texts

    def is_shown(text: str, token: int) -> bool:
        is_marker = text in MARKERS and token not in tokenizer.special_ids
        return is_marker or any(text in other for other in texts)

    return tokenizer.control_ids - {token for text, token in tokenizer.control_tokens.items() if is_shown(text, token)}


def make_reader(tokenizer: Tokenizer, prompt: Prompt, options: ReadingOptions) -> MarkedReader | HarmonyReader:
    """The reader of the format in which the model answers this prompt."""
    if not prompt.harmony:
        return MarkedReader(tokenizer, prompt, options)
    return HarmonyReader(
        tokenizer,
        options.stop,
        tools=bool(options.tools),
        inside_answer=prompt.inside_answer,
        before=prompt.ids if prompt.continues_text else (),
        one_call=options.one_call,
        new_id=options.new_id,
    )


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
        options: ReadingOptions = ReadingOptions(),
        *,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._id = request_id
        self._index = index
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._reader = make_reader(tokenizer, prompt, options)
        self._logprobs: deque[TokenLogprobs] = deque()  # log-probabilities of tokens whose text is not reported yet
        self.generated = 0
        self.cached = 0
        self.done = False

    def first(self, token: int) -> Piece:
        """The first piece of an answer that repeats the prompt token by token. The first token has no
        log-probability."""
        text = self._tokenizer.decode([token], hidden=hidden_ids(self._tokenizer, AnswerFormat()))
        return Piece(id=self._id, choice=self._index, text=text, logprobs=[self._logprob(token, math.nan)])

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
        count = self._reader.push(tokens)
        ended = self._reader.ended
        self.done = ended or delta.finish is not None
        if self.done and delta.finish != "cancelled":
            reached_limit = delta.finish == "length" and not ended
            return self._last_piece(count, "length" if reached_limit else "stop")
        output = self._reader.take()
        if output == Output() and not count:
            return None
        return self._piece(output, count, None)

    def _tokens_with_text(self, delta: Delta) -> tuple[int, ...]:
        """The tokens of a delta, without a stop token at the end of the answer."""
        if delta.finish == "stop" and self._stop_ids.issuperset(delta.tokens[-1:]):
            return delta.tokens[:-1]
        return delta.tokens

    def _last_piece(self, count: int, finish: Finish) -> Piece:
        count += self._reader.finish(cut=finish == "length")
        if finish == "stop" and self._reader.calls:
            finish = "tool_calls"
        return replace(self._piece(self._reader.take(), count, finish), stop=self._reader.stop)

    def _piece(self, output: Output, count: int, finish: Finish | None) -> Piece:
        """`count`: number of tokens whose text is in the piece."""
        logprobs = [self._logprobs.popleft() for _ in range(min(count, len(self._logprobs)))]
        return Piece(
            id=self._id,
            choice=self._index,
            text=output.text,
            reasoning=output.reasoning,
            tool_calls=output.calls,
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
