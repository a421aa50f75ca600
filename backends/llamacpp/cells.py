"""The cells of a context of llama.cpp: implementations of sequences.Memory."""

from __future__ import annotations

from typing import Any

from .library import failed, library
from .sequences import TO_END

ALL = -1  # both ends of a range of positions: all positions


class ContextMemory:
    """The cells of a context whose sequences share one cache. A copy shares the cells."""

    def __init__(self, context: Any) -> None:
        self._c = library().c
        self._memory = self._c.llama_get_memory(context)

    def remove(self, sequence: int, start: int, end: int) -> None:
        """See sequences.Memory."""
        if not self._c.llama_memory_seq_rm(self._memory, sequence, start, end):
            raise failed(f"llama.cpp cannot cut sequence {sequence} at position {start}")

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """See sequences.Memory."""
        self._c.llama_memory_seq_cp(self._memory, source, target, start, end)


class StreamMemory(ContextMemory):
    """The cells of a context that has a cache for each sequence. A copy begins at position 0 and copies the cells."""

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """See sequences.Memory. llama.cpp copies all bytes of the cache, when it computes the next batch."""
        assert not start, "the copy of a part would replace the whole cache of the target"
        super().copy(source, target, ALL, ALL)
        self.remove(target, end, TO_END)
