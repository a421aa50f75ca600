"""Makes `llguidance` matchers. The worker and the child process that tries a grammar use the same limits."""

from __future__ import annotations

from collections.abc import Callable

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
        """`encode` converts text to ids. Without it, the longest token is taken first. Raises ValueError for a
        vocabulary that cannot spell every text."""
        self.tokens = list(table.tokens)
        special = table.eos_ids | table.control_ids
        self.eos_ids = sorted(token for token in table.eos_ids if token < len(self.tokens))
        self.special_token_ids = sorted(token for token in special if token < len(self.tokens))
        for token in self.special_token_ids:
            self.tokens[token] = b"<[%d]>" % token
        self.eos_token_id = self.eos_ids[0]
        self.greedy: Encode = lambda text: []
        self._encode = encode
        special_ids = frozenset(self.special_token_ids)
        self._texts = {token: data for token, data in enumerate(self.tokens) if data and token not in special_ids}
        self._ids = {data: token for token, data in self._texts.items()}
        if not all(bytes([byte]) in self._ids for byte in _UTF8):
            raise ValueError("it has no token for some byte of UTF-8, so that some texts have no tokens")

    def __call__(self, data: bytes) -> list[int]:
        """The ids of a text in bytes: those of the model's own tokenizer, unless it changes the text."""
        text = data.decode()
        ids = self._encoded(text)
        return ids if self._join(ids) == data else self.greedy(text)

    def _encoded(self, text: str) -> list[int]:
        ids = self._encode(text) if self._encode else []
        if not self._texts.keys() >= set(ids):
            return []
        if self._join(ids) == b" " + text.encode():  # sentencepiece begins a text with a space
            first = self.tokens[ids[0]].removeprefix(b" ")
            return ([self._ids[first]] if first in self._ids else []) + ids[1:]
        return ids

    def _join(self, ids: list[int]) -> bytes:
        return b"".join(map(self.tokens.__getitem__, ids))


def make_tokens(table: TokenTable, encode: Encode | None = None) -> LLTokenizer:
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
    return tokens


def make_matcher(tokens: LLTokenizer, grammar: str) -> tuple[LLMatcher, str]:
    """The matcher, and the problem of the grammar in at most 500 characters; an empty text if there is no problem."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return matcher, " ".join(matcher.get_error().split())[:500]
    return matcher, "; ".join(matcher.get_grammar_warnings())[:500]
