"""Grammars over token ids: a minimum length of the answer, and a given beginning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...engine.grammar import Grammar, all_tokens


class MinimumLength:
    """Forbids the tokens that end an answer before it has a number of tokens. Implements engine.grammar.Grammar."""

    def __init__(self, count: int, ends: Iterable[int], vocab_size: int, inner: Grammar | None = None) -> None:
        """`inner`: the grammar of the answer; None: free text."""
        self._remaining = count
        self._inner = inner
        self._free = all_tokens(vocab_size)
        self._ends = all_tokens(vocab_size)
        for token in ends:
            self._ends[token // 32] &= ~np.uint32(1 << token % 32)

    def allowed(self) -> NDArray[np.uint32]:
        mask = self._free if self._inner is None else self._inner.allowed()
        return mask & self._ends if self._remaining > 0 else mask

    def accept(self, token: int) -> None:
        self._remaining -= 1
        if self._inner is not None:
            self._inner.accept(token)

    def copy(self) -> MinimumLength:
        other = object.__new__(MinimumLength)
        other._remaining, other._free, other._ends = self._remaining, self._free, self._ends
        other._inner = None if self._inner is None else self._inner.copy()
        return other

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished


class Beginning:
    """Gives the first tokens of an answer. Implements engine.grammar.Grammar."""

    def __init__(self, tokens: Sequence[int], vocab_size: int, inner: Grammar | None = None) -> None:
        """`inner`: the grammar of the rest of the answer; None: free text."""
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._inner = inner
        self._accepted = 0

    def allowed(self) -> NDArray[np.uint32]:
        if self._accepted >= len(self._tokens):
            return all_tokens(self._vocab_size) if self._inner is None else self._inner.allowed()
        mask = np.zeros(-(-self._vocab_size // 32), np.uint32)
        token = self._tokens[self._accepted]
        mask[token // 32] = np.uint32(1 << token % 32)
        return mask

    def accept(self, token: int) -> None:
        if self._accepted >= len(self._tokens) and self._inner is not None:
            self._inner.accept(token)
        self._accepted += 1

    def copy(self) -> Beginning:
        other = Beginning(self._tokens, self._vocab_size, None if self._inner is None else self._inner.copy())
        other._accepted = self._accepted
        return other

    @property
    def finished(self) -> bool:
        return self._accepted >= len(self._tokens) and self._inner is not None and self._inner.finished
