"""Makes `llguidance` matchers. The worker and the child process that tries a grammar use the same limits."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance import LLParserLimits as Limits

# Fuel counts the work of the regex engine. A modern processor uses some 10,000 units per millisecond.
LIMITS = Limits(
    initial_lexer_fuel=4_000_000,
    step_lexer_fuel=300_000,
    max_items_in_row=20_000,
    max_grammar_size=200_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


Encode = Callable[[str], list[int]]


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model, for the grammar compiler: either `tokenizer_json`, or `tokens` and `special_ids`."""

    vocab_size: int
    eos_ids: list[int]
    tokenizer_json: str = ""  # the text of tokenizer.json
    tokens: list[bytes] = []  # the bytes of each token
    special_ids: list[int] = []  # tokens that are no text; a grammar names them, for example <tool_call>


class _TokenBytes:
    """The tokenizer that llguidance expects beside token bytes. It converts the text that a grammar prescribes."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        padding = [b""] * (vocabulary.vocab_size - len(vocabulary.tokens))
        self.tokens = vocabulary.tokens + padding
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self.greedy: Encode = lambda text: []
        self._special_ids = frozenset(vocabulary.special_ids)
        self._encode = encode

    def __call__(self, data: bytes) -> list[int]:
        """The ids of a text in bytes: those of the model's own tokenizer, unless it adds bytes to the text."""
        text = data.decode()
        ids = self._encode(text) if self._encode else []
        if self._join(ids) == b" " + data:  # sentencepiece begins a text with a space
            first = self.tokens[ids[0]].removeprefix(b" ")
            ids = self._id_of(first) + ids[1:]
        if self._join(ids) == data and self._special_ids.isdisjoint(ids):
            return ids
        return self.greedy(text)

    def _id_of(self, data: bytes) -> list[int]:
        return [self.tokens.index(data)] if data and data in self.tokens else []

    def _join(self, ids: list[int]) -> bytes:
        return b"".join(map(self.tokens.__getitem__, ids))


def make_tokens(vocabulary: Vocabulary, encode: Encode | None = None) -> LLTokenizer:
    """The tokens of a vocabulary. Takes about a second for 150,000 tokens.

    `encode` converts text to ids, for a vocabulary without tokenizer_json. Raises ValueError for a tokenizer that the
    library cannot read.
    """
    try:
        if vocabulary.tokenizer_json:
            return _llguidance(vocabulary.tokenizer_json, vocabulary)
        token_bytes = _TokenBytes(vocabulary, encode)
        tokens = _llguidance(TokenizerWrapper(token_bytes), vocabulary)
        token_bytes.greedy = tokens.greedy_tokenize
        return tokens
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic derives from BaseException
            raise
        raise ValueError(str(error)) from None


def _llguidance(tokenizer: str | TokenizerWrapper, vocabulary: Vocabulary) -> LLTokenizer:
    return LLTokenizer(tokenizer, n_vocab=vocabulary.vocab_size, eos_token=vocabulary.eos_ids)


def make_matcher(tokens: LLTokenizer, grammar: str) -> tuple[LLMatcher, str]:
    """The matcher, and the problem of the grammar in at most 500 characters; an empty text if there is no problem."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return matcher, " ".join(matcher.get_error().split())[:500]
    return matcher, "; ".join(matcher.get_grammar_warnings())[:500]
