"""The vocabulary of a GGUF model: llama.cpp's own tokenizer."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from enum import IntFlag
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from .library import library

KINDS = ("none", "SPM", "BPE", "WPM", "UGM", "RWKV", "PLAMO2", "TEST")  # llama_vocab_type, by its number
MAX_TEXT = 4 * 2**20  # characters of a text to tokenize
_PIECE = 256  # bytes of the first buffer for the text of a token
# llama.cpp matches a regular expression with std::regex, which calls itself for each character of a word: 100,000
# spaces overflow the stack of a usual thread and end the process.
_SHORT_TEXT = 512  # characters that any thread's stack can take
_STACK_PER_CHARACTER = 1024  # bytes
_SPARE_STACK = 16 * 2**20  # bytes
_STACK_UNIT = 2**16  # bytes; some systems need whole pages of memory
# llama.cpp moves all ids of a text at each character that has no token, if the vocabulary is that of sentencepiece.
# Chunks bound this.
_CHUNK = 2048  # minimum number of characters

T = TypeVar("T")
_stack_size = threading.Lock()  # of new threads, which is a setting of the process


class Attribute(IntFlag):
    """llama_token_attr: the attributes of a token that localllm uses."""

    UNKNOWN = 1
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32
    LSTRIP = 128  # white space before the token belongs to the token
    RSTRIP = 256  # white space after the token belongs to the token


class Vocabulary:
    """Tokenizes text, and has the tokens of a GGUF model. Thread-safe. llama.cpp's model must live as long as this."""

    def __init__(self, model: Any) -> None:
        """`model`: a llama_model pointer, of a whole model or of one that was loaded with vocab_only."""
        self._c = library().c
        self._vocab = self._c.llama_model_get_vocab(model)
        kind: int = self._c.llama_vocab_type(self._vocab)
        self.kind = KINDS[kind] if kind < len(KINDS) else "new"
        self.size: int = self._c.llama_vocab_n_tokens(self._vocab)

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text of at most MAX_TEXT characters, without BOS and EOS.

        `special`: control tokens in the text become their ids; otherwise they are plain text. Raises MemoryError if
        there is no memory for the stack.
        """
        if len(text) <= _SHORT_TEXT:
            return self._tokenize(text, special)
        if self.kind == "SPM":
            return self._tokenize_chunks(text, special)
        return _with_stack(_SPARE_STACK + _STACK_PER_CHARACTER * len(text), lambda: self._tokenize(text, special))

    def _tokenize(self, text: str, special: bool) -> list[int]:
        data = text.encode()
        capacity = len(data) + 2
        while True:
            ids = (ctypes.c_int32 * capacity)()
            count = self._c.llama_tokenize(self._vocab, data, len(data), ids, capacity, False, special)
            if count >= 0:
                return ids[:count]
            capacity = -count

    def _tokenize_chunks(self, text: str, special: bool) -> list[int]:
        first, *others = self._chunks(text)
        ids = self._tokenize(first, special)
        for chunk in others:
            # Each call may add a space, which cannot merge with the first character of the chunk.
            alone = self._tokenize(chunk[0], special)
            added = len(alone) - len(chunk[0].encode())
            ids += self._tokenize(chunk, special)[added:]
        return ids

    def _chunks(self, text: str) -> list[str]:
        """The text, divided before characters that are in no token. So no token crosses the boundary of a chunk."""
        bounds = [0]
        for match in self._foreign.finditer(text):
            if match.start() >= bounds[-1] + _CHUNK:
                bounds.append(match.start())
        return [text[start:stop] for start, stop in pairwise([*bounds, len(text)])]

    @cached_property
    def _foreign(self) -> re.Pattern[str]:
        """Matches a character that is in no token and does not follow an added token, after which a space is added.

        White space may belong to an added token. So the character is not white space and does not follow white space.
        """
        texts = list(map(self.text, range(self.size)))
        added = int(Attribute.CONTROL | Attribute.UNKNOWN | Attribute.USER_DEFINED)
        ends = {text[-1:] for text, value in zip(texts, self.attributes(), strict=True) if value & added}
        return re.compile(f"(?<![\\s{_escaped(ends)}])[^\\s{_escaped(set().union(*texts))}]")

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text. `token`: below `size`."""
        length = _PIECE
        while True:
            buffer = ctypes.create_string_buffer(length)
            written = self._c.llama_token_to_piece(self._vocab, token, buffer, length, 0, True)
            if written >= 0:
                return buffer.raw[:written]
            length = -written

    def text(self, token: int) -> str:
        """The text of a token as the vocabulary spells it. `token`: below `size`."""
        text: bytes = self._c.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace")

    def attributes(self) -> list[int]:
        """The attributes of each token: combinations of Attribute and others; empty without a vocabulary."""
        if self.kind == "none":
            return []
        attribute = self._c.llama_vocab_get_attr
        return [attribute(self._vocab, token) for token in range(self.size)]

    def ends_generation(self, token: int) -> bool:
        ends: bool = self._c.llama_vocab_is_eog(self._vocab, token)
        return ends

    def special(self, name: str) -> int | None:
        """The id of a special token: bos, eos, eot, pad or sep. None if the model has no such token."""
        token: int = getattr(self._c, f"llama_vocab_{name}")(self._vocab)
        return token if token >= 0 else None

    @property
    def adds_bos(self) -> bool:
        adds: bool = self._c.llama_vocab_get_add_bos(self._vocab)
        return adds

    @property
    def adds_eos(self) -> bool:
        adds: bool = self._c.llama_vocab_get_add_eos(self._vocab)
        return adds


def _escaped(characters: set[str]) -> str:
    """Characters for a set in a regular expression."""
    return "".join(map(re.escape, sorted(characters)))


def _with_stack(size: int, function: Callable[[], T]) -> T:
    """Call the function in a thread with a stack of `size` bytes. Raises MemoryError and the errors of the function."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tokenizer")
    with _stack_size:
        before = threading.stack_size(-(-size // _STACK_UNIT) * _STACK_UNIT)
        try:
            thread.start()
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
