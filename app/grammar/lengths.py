"""A grammar over token ids: a minimum length of the answer."""

from __future__ import annotations

from collections.abc import Iterable

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
