"""Pages of the engine as sequences of llama.cpp.

llama.cpp has cells instead of pages. A cell has the KV of one position, and the ids of the sequences that read it. A
row reads all cells of its sequence, so the sequence must have exactly the cells of the row's positions.

    engine      row 0: pages 3 5 8     row 1: pages 3 5 9     a cached path of the prefix tree: pages 3 6
    sequences   0: pages 3 5 8         1: pages 3 5 9         2: pages 3 6
    cells       those of page 3 have the ids 0, 1 and 2, those of page 5 the ids 0 and 1, all others one id

The KV of a page depends on all tokens before it, so every sequence that has the page also has the cells of all
positions before it. A row can continue such a sequence if the later positions of the sequence belong to the row too.
Otherwise a new sequence gets the same cells, up to the row's first position.

A page that the engine frees loses its cells, so the cells in use are never more than the positions of the pages in use.
There are always enough ids, because the engine limits the number of paths (RunnerSpec.max_paths).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...engine.batch import Batch, Ints
from ...engine.errors import RunnerFailed

TO_END = -1  # the end of a range of positions: no limit


class Memory(Protocol):
    """The cells of a context of llama.cpp."""

    def remove(self, sequence: int, start: int, end: int) -> None:
        """Remove the id `sequence` from its cells of the positions start…end-1. A cell without ids is free."""
        ...

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Add the id `target` to the cells that `source` has for the positions start…end-1. `target` has no cell of
        these positions."""
        ...


def sequence_ids(num_ids: int, *, paired: bool) -> Ints:
    """The ids of each sequence, if llama.cpp has `num_ids`: [sequences, 1], or [sequences, 2] for PairedMemory."""
    size = 2 if paired else 1
    count = num_ids // size
    return np.ascontiguousarray(np.arange(count * size, dtype=np.int32).reshape(size, count).T)


class PairedMemory:
    """The cells of a model with a sliding window (llama_model_n_swa). Each sequence has two ids: n and n + `count`.

    llama.cpp overwrites a cell that the window has passed if the cell has one id only, even with swa_full. A sequence
    that is cut or copied later would then lack positions of its window, and llama.cpp reports no error. It keeps cells
    with two ids. So a step must write each token with both ids, and the context needs 2 * `count` ids.
    """

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._count = count

    def remove(self, sequence: int, start: int, end: int) -> None:
        """See Memory."""
        self._memory.remove(sequence, start, end)
        self._memory.remove(sequence + self._count, start, end)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """See Memory."""
        self._memory.copy(source, target, start, end)
        self._memory.copy(source, target + self._count, start, end)


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence of llama.cpp. It has the cells of the positions 0…length-1."""

    id: int
    length: int = 0
    contents: list[Content] = field(default_factory=list)  # of its pages, in order of position


@dataclass(slots=True, eq=False)
class Content:
    """The cells of one page. All its sequences have the same cells of it."""

    index: int  # position of the page in these sequences
    sequences: set[Sequence]
    pages: int = 1  # number of pages of the engine with these cells: more than 1 while rows share copies of a page


class PagedSequences:
    """Gives sequences to the rows of a runner that has one cache group without a window, and no states."""

    in_order = False  # see runner.Sequences

    def __init__(self, memory: Memory, page_size: int, count: int) -> None:
        """`count`: the number of sequence ids, which is RunnerSpec.max_paths."""
        self._memory = memory
        self._page_size = page_size
        self._free = list(range(count - 1, -1, -1))
        self._sequences: dict[int, Sequence] = {}  # the sequences that have cells, by id
        self._contents: dict[int, Content] = {}  # by page of the engine
        self._placed: set[Sequence] = set()  # the sequences of this step's rows

    def place(self, batch: Batch) -> Ints:
        """The sequence id of each row [rows]. The sequence has the cells of all positions before the row's first one,
        and no others. The caller must compute the row's tokens for this sequence next.

        Raises RunnerFailed if the batch contradicts the batches before it."""
        [table] = batch.page_tables
        self._free_pages(batch)
        starts = batch.positions[batch.row_starts[:-1]]
        previous = table[np.arange(len(starts)), (starts - 1) // self._page_size]
        self._placed.clear()
        sequences: list[Sequence] = []
        for row, (start, page) in enumerate(zip(starts.tolist(), previous.tolist(), strict=True)):
            sequence = self._place_row(start, page, table[row])
            self._placed.add(sequence)
            sequences.append(sequence)
        self._arrange(sequences)
        self._extend(sequences, starts, batch.context_lens, table)
        return np.array([sequence.id for sequence in sequences], np.int32)

    def _arrange(self, sequences: list[Sequence]) -> None:
        """Change the ids of the rows' sequences, if a step needs certain ids."""

    def _free_pages(self, batch: Batch) -> None:
        """Remove the cells of freed pages, and give the targets of page copies the cells of their sources."""
        [copies] = batch.page_copies
        copied = [(target, self._content(source)) for source, target in copies.tolist()]
        for _, content in copied:
            content.pages += 1
        ends: dict[Sequence, int] = {}  # index of the first page that each sequence loses
        for pages in batch.freed_pages:
            for page, replacement in pages.tolist():
                self._free_page(page, replacement, ends)
        for sequence, index in ends.items():
            self._cut(sequence, index * self._page_size)
        for target, content in copied:
            self._forget(target)
            self._contents[target] = content

    def _free_page(self, page: int, replacement: int, ends: dict[Sequence, int]) -> None:
        content = self._contents.pop(page, None)
        if content is None:
            return
        content.pages -= 1
        if content.pages:
            return
        equal = self._contents.get(replacement)
        if equal is not None and equal.sequences:
            self._replace(content, equal)
            return
        for sequence in content.sequences:
            ends[sequence] = min(ends.get(sequence, content.index), content.index)

    def _replace(self, content: Content, equal: Content) -> None:
        """Record that the sequences of `content` have the equal content of another page."""
        for sequence in content.sequences:
            self._share(sequence, equal)
            equal.sequences.add(sequence)
            sequence.contents[content.index] = equal

    def _share(self, sequence: Sequence, content: Content) -> None:
        """Give the sequence the cells of `content` instead of its own, which are equal."""
        start = content.index * self._page_size
        end = start + self._page_size
        self._memory.remove(sequence.id, start, end)
        self._memory.copy(next(iter(content.sequences)).id, sequence.id, start, end)

    def _place_row(self, start: int, page: int, pages: Ints) -> Sequence:
        """The sequence of a row. `page`: the page of the position before `start`. `pages`: all pages of the row."""
        if not start:
            return self._new_sequence()
        content = self._content(page)
        if content.pages == len(content.sequences) == 1:
            [sequence] = content.sequences
            if sequence.length == start and sequence not in self._placed:  # the usual case: the row of the last step
                return sequence
        sequence = self._continued(content, start, pages) or self._copied(content, start)
        if start % self._page_size:
            self._separate(content, sequence, page)
        return sequence

    def _continued(self, content: Content, start: int, pages: Ints) -> Sequence | None:
        """A sequence with this content that the row can continue, cut to `start` positions; None if there is none."""
        first = start // self._page_size
        for sequence in content.sequences:
            later = sequence.contents[first:]
            if sequence not in self._placed and self._belong(later, pages[first : first + len(later)].tolist()):
                self._cut(sequence, start)
                return sequence
        return None

    def _belong(self, contents: list[Content], pages: list[int]) -> bool:
        """Whether these contents belong to these pages, and to no others."""
        if len(contents) != len(pages):
            return False
        pairs = zip(contents, pages, strict=True)
        return all(content.pages == 1 and self._contents.get(page) is content for content, page in pairs)

    def _copied(self, content: Content, start: int) -> Sequence:
        """A new sequence with the first `start` positions of the sequences that have this content."""
        sequence = self._new_sequence()
        source = next(iter(content.sequences))
        self._memory.copy(source.id, sequence.id, 0, start)
        sequence.length = start
        sequence.contents = source.contents[: content.index + 1]
        for shared in sequence.contents:
            shared.sequences.add(sequence)
        return sequence

    def _separate(self, content: Content, sequence: Sequence, page: int) -> None:
        """Make the sequence the only one with the content of this page, because its row continues within the page."""
        if content.pages == len(content.sequences) == 1:
            return
        content.sequences.remove(sequence)
        self._forget(page)
        self._contents[page] = sequence.contents[content.index] = Content(content.index, {sequence})

    def _extend(self, sequences: list[Sequence], starts: Ints, ends: Ints, table: Ints) -> None:
        """Record the positions that the step writes."""
        first = -(-starts // self._page_size)
        last = -(-ends // self._page_size)
        for row in np.flatnonzero(last > first).tolist():
            for index in range(first[row], last[row]):
                page = int(table[row, index])
                self._forget(page)
                self._contents[page] = Content(index, {sequences[row]})
                sequences[row].contents.append(self._contents[page])
        for sequence, end in zip(sequences, ends.tolist(), strict=True):
            sequence.length = end

    def _content(self, page: int) -> Content:
        """The content of a page. Raises RunnerFailed if no sequence has it."""
        content = self._contents.get(page)
        if content is None or not content.sequences:
            raise RunnerFailed(f"a row reads page {page}, but no sequence of llama.cpp has its cells")
        return content

    def _forget(self, page: int) -> None:
        """Remove the cells of a page that is written anew, unless another page has the same content."""
        content = self._contents.pop(page, None)
        if content is None:
            return
        content.pages -= 1
        if not content.pages:
            for sequence in tuple(content.sequences):
                self._cut(sequence, content.index * self._page_size)

    def _cut(self, sequence: Sequence, length: int) -> None:
        """Remove all positions from `length` on. A sequence without positions returns its id."""
        count = -(-length // self._page_size)
        for content in sequence.contents[count:]:
            content.sequences.discard(sequence)
        del sequence.contents[count:]
        if sequence.length > length:
            self._memory.remove(sequence.id, length, TO_END)
            sequence.length = length
        if not length:
            del self._sequences[sequence.id]
            self._free.append(sequence.id)

    def _new_sequence(self) -> Sequence:
        """A sequence without cells."""
        if not self._free:
            self._cut(self._redundant_sequence(), 0)
        sequence = Sequence(self._free.pop())
        self._memory.remove(sequence.id, 0, TO_END)  # a step that failed may have left cells
        self._sequences[sequence.id] = sequence
        return sequence

    def _redundant_sequence(self) -> Sequence:
        """A sequence that no row uses and that shares all its cells. Raises RunnerFailed if there is none."""
        for sequence in self._sequences.values():
            if sequence not in self._placed and len(sequence.contents[-1].sequences) > 1:
                return sequence
        raise RunnerFailed("all sequences of llama.cpp are in use, although the engine limits the paths")


class StateSequences:
    """Gives sequences to the rows of a runner that has states and no cache groups: a state or snapshot is a sequence.

    llama.cpp cannot cut these sequences, but it copies them: a copy shares the state until one of both continues.
    """

    in_order = False  # see runner.Sequences

    def __init__(self, memory: Memory, count: int) -> None:
        """`count`: the number of sequence ids, one for each state and snapshot."""
        self._memory = memory
        self._ids = np.arange(count, dtype=np.int32)  # the sequence id of each state and snapshot

    def place(self, batch: Batch) -> Ints:
        """The sequence id of each row [rows]. A row that begins at position 0 has an empty sequence."""
        self._copy_states({target: source for source, target in batch.state_copies.tolist()})
        starts = batch.positions[batch.row_starts[:-1]]
        sequences: Ints = self._ids[batch.states]
        for sequence in sequences[starts == 0].tolist():
            self._memory.remove(sequence, 0, TO_END)
        return sequences

    def _copy_states(self, sources: dict[int, int]) -> None:
        """Copy states as if all at once. `sources`: the source of each target."""
        while sources:
            targets = sources.keys() - sources.values()
            if not targets:  # the sources are the targets in another order
                self._ids[list(sources)] = self._ids[list(sources.values())]
                return
            for target in targets:
                source = int(self._ids[sources.pop(target)])
                copy = int(self._ids[target])
                self._memory.remove(copy, 0, TO_END)
                self._memory.copy(source, copy, 0, TO_END)
