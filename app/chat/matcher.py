"""Makes `llguidance` matchers. The worker and the child process that tries a grammar use the same limits."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer
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


def make_tokens(tokenizer_json: str, vocab_size: int, eos_ids: list[int]) -> LLTokenizer:
    """The tokens of a vocabulary. Takes about a second for 150,000 tokens.

    `tokenizer_json`: the text of tokenizer.json. Raises ValueError for a tokenizer that the library cannot read.
    """
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_ids)
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
