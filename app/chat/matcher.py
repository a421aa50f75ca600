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


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model, for the grammar compiler: either `tokenizer_json`, or `tokens` and `special_ids`."""

    vocab_size: int
    eos_ids: list[int]
    tokenizer_json: str = ""  # the text of tokenizer.json
    tokens: list[bytes] = []  # the bytes of each token
    special_ids: list[int] = []  # tokens that are no text; a grammar names them, for example <tool_call>


class _TokenBytes:
    """The tokenizer that llguidance expects beside token bytes."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        padding = [b""] * (vocabulary.vocab_size - len(vocabulary.tokens))
        self.tokens = vocabulary.tokens + padding
        self.special_token_ids = vocabulary.special_ids
        self._special_ids = frozenset(vocabulary.special_ids)
        self.eos_token_id = vocabulary.eos_ids[0]
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text that a grammar prescribes; without ids, the grammar allows every token that fits."""
        ids = self._encode(text.decode("utf-8", "replace"))
        is_exact = b"".join(map(self.tokens.__getitem__, ids)) == text
        return ids if is_exact and self._special_ids.isdisjoint(ids) else []


def make_tokens(vocabulary: Vocabulary, encode: Callable[[str], list[int]] = lambda text: []) -> LLTokenizer:
    """The tokens of a vocabulary. Takes about a second for 150,000 tokens.

    `encode` converts text to ids, for a vocabulary without tokenizer_json. Raises ValueError for a tokenizer that the
    library cannot read.
    """
    tokenizer: str | TokenizerWrapper = vocabulary.tokenizer_json
    if not tokenizer:
        tokenizer = TokenizerWrapper(_TokenBytes(vocabulary, encode))
    try:
        return LLTokenizer(tokenizer, n_vocab=vocabulary.vocab_size, eos_token=vocabulary.eos_ids)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic derives from BaseException
            raise
        raise ValueError(str(error)) from None


def make_matcher(tokens: LLTokenizer, grammar: str) -> tuple[LLMatcher, str]:
    """The matcher, and the problem of the grammar in at most 500 characters; an empty text if there is no problem."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return matcher, " ".join(matcher.get_error().split())[:500]
    return matcher, "; ".join(matcher.get_grammar_warnings())[:500]
