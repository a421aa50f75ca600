"""The child process that tries a grammar before the worker compiles it: some grammars take minutes or gigabytes."""

from __future__ import annotations

import random

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..bounded import serve
from ..chat.tokenizer.base import TokenTable
from .matcher import make_matcher, make_tokens

STEPS = 16  # tokens of one trial; the first masks are the slowest, because they build the states of the lexer


def find_problem(tokens: LLTokenizer, grammar: str) -> str:
    """Generates STEPS random tokens that the grammar allows. Returns the problem of the grammar, or an empty text."""
    matcher, problem = make_matcher(tokens, grammar)
    if problem:
        return problem
    chance = random.Random(0)
    for step in range(STEPS):
        if matcher.is_stopped():
            break
        allowed = _allowed(matcher)
        is_dead_end = matcher.is_stopped() and not matcher.is_accepting()
        if is_dead_end and step == 0:
            return "no text can match it"
        if matcher.is_error():
            return matcher.get_error().split("\n")[0]
        matcher.consume_token(chance.choice(allowed))
    return ""


def _allowed(matcher: LLMatcher) -> list[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return tokens


class _Trials:
    tokens: LLTokenizer

    def greet(self, hello: bytes) -> None:
        table = msgspec.msgpack.decode(hello, type=TokenTable)
        self.tokens = make_tokens(table)

    def handle(self, request: bytes) -> bytes:
        return find_problem(self.tokens, request.decode()).encode()


if __name__ == "__main__":
    trials = _Trials()
    serve(trials.greet, trials.handle)
