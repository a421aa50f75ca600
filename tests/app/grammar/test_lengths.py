"""Grammars over token ids."""

from __future__ import annotations

import numpy as np

from localllm.app.grammar.lengths import MinimumLength
from localllm.engine.grammar import all_tokens, allowed_tokens, unpack_mask

VOCAB = 40


class Even:
    """Allows the even tokens; finished after two."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def allowed(self):
        return np.array([0x55555555, 0x55], np.uint32)

    def accept(self, token: int) -> None:
        self.count += 1

    def copy(self) -> Even:
        return Even(self.count)

    @property
    def finished(self) -> bool:
        return self.count >= 2


def tokens(grammar: MinimumLength) -> set[int]:
    mask = unpack_mask(allowed_tokens(grammar, VOCAB)[None], VOCAB)[0]
    return set(np.flatnonzero(mask).tolist())


def test_the_ends_are_forbidden_until_the_answer_is_long_enough() -> None:
    grammar = MinimumLength(2, [3, 35], VOCAB)
    assert tokens(grammar) == set(range(VOCAB)) - {3, 35}
    grammar.accept(1)
    ahead = grammar.copy()
    ahead.accept(1)
    assert tokens(ahead) == set(range(VOCAB))
    assert tokens(grammar) == set(range(VOCAB)) - {3, 35}, "a copy is independent"
    assert not ahead.finished


def test_inside_another_grammar() -> None:
    inner = Even()
    grammar = MinimumLength(1, [4], VOCAB, inner)
    assert tokens(grammar) == set(range(0, VOCAB, 2)) - {4}
    grammar.accept(2)
    assert tokens(grammar) == set(range(0, VOCAB, 2))
    ahead = grammar.copy()
    ahead.accept(2)
    assert (ahead.finished, grammar.finished, inner.count) == (True, False, 1)


def test_mask_of_all_tokens_has_no_bit_beyond_the_vocabulary() -> None:
    assert all_tokens(40).tolist() == [0xFFFFFFFF, 0xFF]
    assert all_tokens(32).tolist() == [0xFFFFFFFF]
