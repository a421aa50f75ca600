"""The output format of gpt-oss: messages with a header, a channel and a text, between special tokens (OpenAI Harmony).

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The channel `analysis` has the reasoning. The text of `final`, and of `commentary` without a recipient, is the answer.
A message to `functions.NAME` is a tool call. The recipient may also be before the channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from ....engine.text import StopFilter, TextStream
from ..calls.harmony import CHANNEL, ENDS, FUNCTIONS, MARKERS, MESSAGE, START
from ..calls.reading import Calls
from ..tokenizer.base import Tokenizer
from .parser import Output, new_id

SEPARATOR = "\n\n"  # between the texts of two messages
# Tokens of a header. A longer one is text: each new token decodes the header again, and its text must not stay hidden.
MAX_HEADER = 256

_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([^\s<]*)")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_HEADER = re.compile(r"[^\s<]*(?:\s+to=[^\s<]*|<\|channel\|>[^\s<]*)*\s*(?:<\|constrain\|>)?[^\s<]*")
_NOT_TOOLS = frozenset({"", "all", "assistant", "user"})  # recipients of ordinary messages

Field = Literal["text", "reasoning", "call"]


class HarmonyReader:
    """Splits the tokens of an answer into text, reasoning and tool calls.

    Only special tokens are markers: the same characters in ordinary tokens are text. Stop strings end the visible
    answer only. The arguments of a call are passed on as they come. Calls of a request without tools are text. Messages
    to other recipients or with another role than `assistant` are reasoning. Text without a header is text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        *,
        tools: bool,
        inside_answer: bool = False,
        before: Sequence[int] = (),
        one_call: bool = False,
        new_id: Callable[[int, str], str] = new_id,
    ) -> None:
        """`tools`: a message to a function is a call. `inside_answer`: the answer begins without a header.
        `before`: the tokens of a text that the answer continues. `one_call`: ignore the tokens after the first call."""
        self._calls = Calls(new_id)
        self._tokenizer = tokenizer
        self._tools = tools
        self._stops = StopFilter(stop)
        self._one_call = one_call
        self._markers = {tokenizer.id_of(marker): marker for marker in MARKERS}
        self._header: list[int] = []  # tokens of the header that is not complete
        self._has_role = False  # the header begins with a role
        self._stream: TextStream | None = None  # the text of the open message
        self._field: Field = "text"  # where the text of the open message belongs
        self._name = ""  # name of the called function
        self._written: set[Field] = set()  # fields with text of earlier messages
        self._at_start = True  # the open message has no text yet
        self._output = Output()
        self._has_ended = False  # the only call is complete
        if inside_answer:
            self._open_message("text", before=before)

    @property
    def ended(self) -> bool:
        """True after a stop string, or after the only call: the reader ignores the tokens that follow."""
        return self._stops.stopped or self._has_ended

    @property
    def stop(self) -> str:
        """The stop string that ended the answer; empty: none."""
        return self._stops.stop

    @property
    def calls(self) -> int:
        """Number of tool calls so far."""
        return self._calls.count

    def take(self) -> Output:
        """The output since the last call of `take`."""
        output = self._output
        output.calls = self._calls.parts
        self._output = Output()
        self._calls.parts = []
        return output

    def push(self, tokens: Sequence[int]) -> int:
        """Add tokens. Returns the number of tokens with a complete header or text."""
        count = 0
        for token in tokens:
            if not self.ended:
                count += self._add(token)
        return count

    def finish(self, *, cut: bool = False) -> int:
        """End the answer: nothing stays pending. Returns the number of tokens that it completes.

        `cut`: the answer reached its maximum length. A call that lacks only its end marker counts as a call.
        """
        if self.ended:
            return 0
        count = self._end_message(cut=cut)
        self._output.text += self._stops.finish()
        text = self._tokenizer.decode(self._header)
        is_cut_header = self._is_header(text) and _HEADER.fullmatch(text)
        if not is_cut_header and text.strip():
            tokens = self._header
            count += self._open_message("text", tokens=tokens) + self._end_message()
            self._output.text += self._stops.finish()
            return count
        return count + self._drop_header()

    def _drop_header(self) -> int:
        count = len(self._header)
        self._header = []
        return count

    def _is_header(self, text: str) -> bool:
        """Whether a text before `<|message|>` is a header. Other text is an answer without the format."""
        return self._has_role or text.lstrip().startswith((CHANNEL, "to="))

    def _add(self, token: int) -> int:
        """Add a token. Returns the number of tokens with a complete header or text, as the methods below do."""
        marker = self._markers.get(token)
        if marker == START or marker in ENDS:
            self._has_role = marker == START
            return self._end_message() + self._drop_header() + 1
        if self._stream is None:
            return self._add_to_header(token, marker)
        if marker == CHANNEL:  # the open message lacks its end
            count = self._end_message()
            self._header = [token]
            self._has_role = False
            return count
        return self._add_text([token])

    def _add_to_header(self, token: int, marker: str | None) -> int:
        if marker == MESSAGE:
            count = len(self._header) + 1
            self._read_header()
            return count
        self._header.append(token)
        text = self._tokenizer.decode(self._header)
        is_open = self._is_header(text) or "to=".startswith(text.lstrip())
        if is_open and len(self._header) < MAX_HEADER:
            return 0
        return self._open_message("text", tokens=self._header)

    def _read_header(self) -> None:
        """Open the message after its complete header."""
        text = self._tokenizer.decode(self._header)
        role = re.split(r"[\s<]", text, maxsplit=1)[0] if self._has_role else "assistant"
        channels = _CHANNEL_NAME.findall(text)
        recipients = [name for name in _RECIPIENT.findall(text) if name not in _NOT_TOOLS]
        self._has_role = False
        recipient = recipients[-1] if recipients else ""
        if role not in ("", "assistant"):
            self._open_message("reasoning")
        elif recipient.startswith(FUNCTIONS) and recipient != FUNCTIONS:
            self._name = recipient.removeprefix(FUNCTIONS)
            self._open_message("call" if self._tools else "text")
            if self._tools:
                self._calls.open(self._name)
        else:
            is_reasoning = bool(recipient) or channels[-1:] == ["analysis"]
            self._open_message("reasoning" if is_reasoning else "text")

    def _open_message(self, field: Field, *, before: Sequence[int] = (), tokens: Sequence[int] = ()) -> int:
        """Begin a message with the first tokens of its text. Returns the number of tokens with complete text."""
        hidden = self._tokenizer.control_ids
        self._stream = TextStream(lambda ids: self._tokenizer.decode(ids, hidden=hidden), before=before)
        self._field = field
        self._at_start = True
        count = self._add_text(tokens)
        self._header = []
        return count

    def _add_text(self, tokens: Sequence[int]) -> int:
        assert self._stream is not None
        self._write(self._stream.push(tokens))
        return self._stream.settle(0 if self._stops.stopped or self._field != "text" else self._stops.held)

    def _end_message(self, *, cut: bool = False) -> int:
        if self._stream is None:
            return 0
        self._write(self._stream.finish())
        count = self._stream.settle()
        if self._field == "call":
            self._calls.close(cut=cut)
            self._has_ended = self._one_call
        self._stream = None
        return count

    def _write(self, text: str) -> None:
        """Add text to the field of the open message."""
        if not text:
            return
        if self._field == "call":
            self._calls.write(text)
            return
        if self._at_start and self._field in self._written:
            text = SEPARATOR + text
        self._at_start = False
        self._written.add(self._field)
        if self._field == "text":
            self._output.text += self._stops.feed(text)
        else:
            self._output.reasoning += text
