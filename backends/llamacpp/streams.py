"""Sequences of a context that has a separate cache for each sequence. llama.cpp calls such a cache a stream.

    engine      row 0: pages 3 5 8     row 1: pages 3 5 9     a cached path of the prefix tree: pages 3 6
    streams     0: pages 3 5 8         1: pages 3 5 9         2: pages 3 6
    cells       each stream has its own cells of its pages, in order of position

A row reads only the cells of its stream, so other rows and cached prefixes cost no time. A common prefix is copied
instead of shared. llama.cpp computes the rows of a step together if the numbers of their streams are consecutive;
otherwise it reads the weights again for each group of consecutive numbers. So the rows of a step get such streams.
"""

from __future__ import annotations

from .sequences import TO_END, Content, PagedSequences, Sequence


class StreamSequences(PagedSequences):
    """Gives streams to rows. At least one stream is free before each step, unless steps have one row only."""

    in_order = True

    def _share(self, sequence: Sequence, content: Content) -> None:
        """The sequence keeps its cells: streams share none."""

    def _arrange(self, sequences: list[Sequence]) -> None:
        """Move the sequences to consecutive streams."""
        ids = {sequence.id for sequence in sequences}
        if max(ids) - min(ids) < len(ids):
            return
        window = self._cheapest_window(sequences)
        targets = [stream for stream in window if stream not in ids]
        outside = [sequence for sequence in sequences if sequence.id not in window]
        for sequence, target in zip(outside, targets, strict=True):
            self._empty(target)
            self._move(sequence, target)

    def _cheapest_window(self, sequences: list[Sequence]) -> range:
        """The consecutive streams that need the fewest copies, if the step computes these sequences in them."""
        lengths = {sequence.id: sequence.length for sequence in sequences}
        size = len(sequences)

        def copies(window: range) -> int:
            rows = sum(length > 0 for stream, length in lengths.items() if stream not in window)
            others = sum(stream in self._sequences and stream not in lengths for stream in window)
            return rows + others

        count = len(self._sequences) + len(self._free)
        return min((range(first, first + size) for first in range(count - size + 1)), key=copies)

    def _empty(self, stream: int) -> None:
        """Make the stream free: move its sequence to another one."""
        while stream in self._sequences:
            if self._free:
                self._move(self._sequences[stream], self._free[-1])
            else:
                self._cut(self._redundant_sequence(), 0)

    def _move(self, sequence: Sequence, target: int) -> None:
        """Move the sequence to a free stream."""
        source = sequence.id
        self._memory.remove(target, 0, TO_END)  # a step that failed may have left cells
        if sequence.length:
            self._memory.copy(source, target, 0, sequence.length)
            self._memory.remove(source, 0, TO_END)
        del self._sequences[source]
        self._free.remove(target)
        self._free.append(source)
        self._sequences[target] = sequence
        sequence.id = target
