"""The child process that tries a grammar before the worker compiles it: some inputs take minutes or gigabytes."""

from __future__ import annotations

import random

import msgspec
import numpy as np
from llguidance import LLTokenizer

from .bounded import serve
from .matcher import make_matcher, make_tokens

STEPS = 16  # masks of one trial; the first masks are the slowest, they build the states of the lexer


class Vocabulary(msgspec.Struct, frozen=True):
    """The first message to the child."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: list[int]


def find_problem(tokens: LLTokenizer, grammar: str) -> str:
    """The problem of the grammar, found by a random walk of STEPS tokens; empty if there is none."""
    matcher, problem = make_matcher(tokens, grammar)
    chance = random.Random(0)
    for step in range(STEPS):
        if problem or matcher.is_stopped():
            break
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.nonzero(np.unpackbits(mask, bitorder="little"))[0]
        if step == 0 and matcher.is_stopped() and not matcher.is_accepting():
            return "no text can match it"
        if matcher.is_error():
            return matcher.get_error().split("\n")[0]
        matcher.consume_token(int(chance.choice(allowed)))
    return problem


class _Trials:
    tokens: LLTokenizer

    def greet(self, hello: bytes) -> None:
        vocabulary = msgspec.msgpack.decode(hello, type=Vocabulary)
        self.tokens = make_tokens(vocabulary.tokenizer_json, vocabulary.vocab_size, vocabulary.eos_ids)

    def handle(self, request: bytes) -> bytes:
        return find_problem(self.tokens, request.decode()).encode()


if __name__ == "__main__":
    trials = _Trials()
    serve(trials.greet, trials.handle)
