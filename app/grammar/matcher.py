"""Makes `llguidance` matchers. The worker and the child process that tries a grammar use the same limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance import LLParserLimits as Limits

from ..chat.tokenizer.base import TokenTable

# Fuel counts the work of the regex engine. A modern processor uses some 10,000 units per millisecond.
LIMITS = Limits(
    initial_lexer_fuel=4_000_000,
    step_lexer_fuel=300_000,
    max_items_in_row=20_000,
    max_grammar_size=200_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)

# Bytes of texts: control characters other than white space are escaped in JSON, and rare elsewhere.
_UTF8 = sorted({*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5)})

Encode = Callable[[str], list[int]]


class TokenBytes:
    """The tokenizer that llguidance expects beside token bytes. It converts the text that a grammar prescribes.

    Control tokens and end-of-sequence tokens have names that are no text, so that no text matches them.
    """

    bos_token_id = None

    def __init__(self, table: TokenTable, encode: Encode | None) -> None:
        """`encode` converts text to ids. Without it, the longest token is taken first."""
        self.tokens = list(table.tokens)
        special = table.eos_ids | table.control_ids
        self.eos_ids = sorted(token for token in table.eos_ids if token < len(self.tokens))
        self.special_token_ids = sorted(token for token in special if token < len(self.tokens))
        for token in self.special_token_ids:
            self.tokens[token] = b"<[%d]>" % token
        self.eos_token_id = self.eos_ids[0]
        self.greedy: Encode = lambda text: []
        self.unspelled = ""  # the last text for which there were no tokens
        self._encode = encode

    def __call__(self, data: bytes) -> list[int]:
        """The ids of a text in bytes: those of the model's own tokenizer, unless it changes the text."""
        text = data.decode()
        for spell in (self._encoded, self.greedy, self._segments):
            ids = spell(text)
            if self._join(ids) == data:
                return ids
        self.unspelled = text
        return self.greedy(text)

    @cached_property
    def spells_any_text(self) -> bool:
        """Whether each byte of UTF-8 is a text token."""
        return all(bytes([byte]) in self._ids for byte in _UTF8)

    def spells(self, text: str) -> bool:
        """Whether text tokens can spell the text."""
        return not text or bool(self._segments(text))

    def _encoded(self, text: str) -> list[int]:
        ids = self._encode(text) if self._encode else []
        if not self._texts.keys() >= set(ids):
            return []
        if self._join(ids) == b" " + text.encode():  # sentencepiece begins a text with a space
            first = self.tokens[ids[0]].removeprefix(b" ")
            return ([self._ids[first]] if first in self._ids else []) + ids[1:]
        return ids

    def _segments(self, text: str) -> list[int]:
        """Text tokens that spell a text; empty if there are none. Finds them where the longest token is a dead end."""
        data = text.encode()
        last: dict[int, int] = {0: -1}  # end of a text that tokens spell → its last token
        for start in range(len(data)):
            if start not in last:
                continue
            for length in self._lengths:
                token = self._ids.get(data[start : start + length])
                if token is not None:
                    last.setdefault(start + length, token)
        ids: list[int] = []
        end = len(data)
        while end > 0 and end in last:
            ids.append(last[end])
            end -= len(self.tokens[last[end]])
        return [] if end else ids[::-1]

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(data) for data in self._ids}, reverse=True)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The text tokens by their bytes."""
        return {data: token for token, data in self._texts.items()}

    @cached_property
    def _texts(self) -> dict[int, bytes]:
        """The bytes of the text tokens."""
        special = frozenset(self.special_token_ids)
        return {token: data for token, data in enumerate(self.tokens) if data and token not in special}

    def _join(self, ids: list[int]) -> bytes:
        return b"".join(map(self.tokens.__getitem__, ids))


def make_tokens(table: TokenTable, encode: Encode | None = None) -> tuple[LLTokenizer, TokenBytes]:
    """The tokens of a vocabulary, for llguidance. Takes half a second for 150,000 tokens.

    `encode` converts text to ids. Raises ValueError for a vocabulary that the library cannot read.
    """
    token_bytes = TokenBytes(table, encode)
    try:
        tokens = LLTokenizer(TokenizerWrapper(token_bytes), eos_token=token_bytes.eos_ids)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic derives from BaseException
            raise
        raise ValueError(str(error)) from None
    token_bytes.greedy = tokens.greedy_tokenize
    return tokens, token_bytes


def make_matcher(tokens: LLTokenizer, grammar: str) -> tuple[LLMatcher, str]:
    """The matcher, and the problem of the grammar in at most 500 characters; an empty text if there is no problem."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return matcher, " ".join(matcher.get_error().split())[:500]
    return matcher, "; ".join(matcher.get_grammar_warnings())[:500]


def unspelled(text: str) -> str:
    """The problem of a grammar that prescribes a text for which the vocabulary has no tokens."""
    return f"the vocabulary of this model has no tokens for the text {text[:100]!r}"
