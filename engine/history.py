"""Token counts of one sequence for penalties, in arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .batch import Ints


class TokenHistory:
    """The distinct tokens of one sequence with their counts in prompt and output. `add` takes O(1) time on average."""

    def __init__(self, prompt: Sequence[int]) -> None:
        counts = Counter(prompt)
        self._index = {token: index for index, token in enumerate(counts)}
        self._table = np.zeros((3, len(counts) + 64), np.int32)  # token, count in prompt, count in output
        self._table[0, : len(counts)] = list(counts)
        self._table[1, : len(counts)] = list(counts.values())

    def add(self, token: int) -> None:
        """Count one more token of output."""
        index = self._index.setdefault(token, len(self._index))
        if index == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        self._table[0, index] = token
        self._table[2, index] += 1

    @property
    def table(self) -> Ints:
        """[3, distinct tokens]: token, count in the prompt, count in the output. The next `add` changes it."""
        return self._table[:, : len(self._index)]

    def after(self, tokens: Sequence[int]) -> Ints:
        """A copy of the table that also counts these tokens as output."""
        counts = Counter(tokens)
        new = [token for token in counts if token not in self._index]
        table: Ints = np.concatenate([self.table, np.array([new, [0] * len(new), [0] * len(new)], np.int32)], axis=1)
        columns = {**self._index, **dict(zip(new, range(len(self._index), table.shape[1]), strict=True))}
        for token, count in counts.items():
            table[2, columns[token]] += count
        return table
