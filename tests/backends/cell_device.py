"""A TokenDevice whose KV is a model of llama.cpp's unified cache: cells with a position and the ids of sequences.

It is stricter than llama.cpp: a row must see exactly the cells of its positions, each with the right token, and a
sequence never sees a position twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from localllm.backends.llamacpp.sequences import Memory, PagedSequences, PairedMemory, StateSequences
from localllm.backends.llamacpp.streams import StreamSequences
from localllm.engine.batch import Batch
from localllm.engine.errors import OutOfMemory

from ..engine.token_device import TokenDevice, digest, next_state

FREE = -1


class CellMemory:
    """Implements Memory of backends/llamacpp/sequences.py, with the checks of llama.cpp and some more."""

    def __init__(self, cells: int, ids: int, window: int = 0) -> None:
        """`window`: write() takes the cells with one id that a window of this size has passed; 0: no window."""
        self.window = window
        self.positions = np.full(cells, FREE)
        self.members = np.zeros((cells, ids), bool)  # whether a sequence sees a cell
        self.tokens = np.full((cells, 2), -1, np.int64)  # token, adapter
        self.operations = 0

    @property
    def num_used(self) -> int:
        return int((self.positions != FREE).sum())

    def cells(self, sequence: int) -> np.ndarray:
        """The cells that the sequence sees, in order of position."""
        cells = np.flatnonzero(self.members[:, sequence])
        return cells[np.argsort(self.positions[cells])]

    def _range(self, sequence: int, start: int, end: int) -> np.ndarray:
        assert 0 <= sequence < self.members.shape[1], "this is no sequence id"
        inside = (self.positions >= start) & ((self.positions < end) | (end < 0))
        return self.members[:, sequence] & inside

    def remove(self, sequence: int, start: int, end: int) -> None:
        self.operations += 1
        self.members[self._range(sequence, start, end), sequence] = False
        self.positions[~self.members.any(axis=1)] = FREE

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self.operations += 1
        cells = self._range(source, start, end)
        assert source != target
        assert not self._range(target, start, end).any(), "the target sees cells at these positions already"
        assert cells.sum() == end - start or end < 0, "the source lacks cells of this range"
        self.members[cells, target] = True

    def write(self, sequences: list[int], positions: np.ndarray, tokens: np.ndarray) -> None:
        """Put tokens [count, 2] with the ids of these sequences into free cells."""
        for sequence in sequences:
            assert positions[0] == len(self.cells(sequence)), "llama.cpp refuses a gap or an overlap of positions"
        free = np.flatnonzero((self.positions == FREE) | self.passed())[: len(positions)]
        assert len(free) == len(positions), "no free cells"
        self.members[free] = False
        self.positions[free] = positions
        self.tokens[free] = tokens
        self.members[np.ix_(free, sequences)] = True

    def passed(self) -> np.ndarray:
        """Whether the only sequence that sees a cell has no later position that reads it, [cells]."""
        if not self.window:
            return np.zeros(len(self.positions), bool)
        ends = np.where(self.members, self.positions[:, None] + 1, 0).max(axis=0)  # of each sequence
        last = np.where(self.members, ends, 0).max(axis=1)  # of the sequences of each cell
        return (self.members.sum(axis=1) == 1) & (self.positions + self.window <= last)


class StreamCells(CellMemory):
    """Each sequence has its own cells, in order of position. A copy copies the tokens when the next step writes."""

    def __init__(self, length: int, ids: int) -> None:
        super().__init__(length * ids, ids)
        self.length = length
        self.copies: list[tuple[slice, slice]] = []  # cells (source, target)

    def span(self, sequence: int) -> slice:
        return slice(sequence * self.length, (sequence + 1) * self.length)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self.operations += 1
        assert start == 0
        assert end == self._range(source, start, end).sum(), "the source lacks cells of this range"
        assert not self.members[:, target].any(), "the target has cells"
        self.copies.append((self.span(source), self.span(target)))
        cells = np.arange(end) + target * self.length
        self.members[cells, target] = True
        self.positions[cells] = np.arange(end)

    def write(self, sequences: list[int], positions: np.ndarray, tokens: np.ndarray) -> None:
        [sequence] = sequences
        for source, target in self.copies:
            self.tokens[target] = self.tokens[source]
        self.copies.clear()
        assert positions[0] == len(self.cells(sequence)), "llama.cpp refuses a gap or an overlap of positions"
        assert positions[-1] < self.length, "no free cells"
        cells = positions + sequence * self.length
        self.members[cells, sequence] = True
        self.positions[cells] = positions
        self.tokens[cells] = tokens


@dataclass
class CellDevice(TokenDevice):
    """Rows read the cells of their sequences instead of pages."""

    window: int = 0
    has_streams: bool = False  # whether each sequence has its own cells
    memory: CellMemory = field(init=False)
    sequences: PagedSequences = field(init=False)
    lost_steps: frozenset[int] = frozenset()  # numbers of the steps that run out of memory when half is written

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows: list[int] = []
        [group] = self.spec.groups
        count = self.spec.max_paths
        if self.has_streams:
            self.memory = StreamCells(self.spec.max_length, count + 1)
            self.sequences = StreamSequences(self.memory, group.page_size, count + 1)
            return
        self.memory = CellMemory(group.tokens, 2 * count if self.window else count, self.window)
        memory: Memory = PairedMemory(self.memory, count) if self.window else self.memory
        self.sequences = PagedSequences(memory, group.page_size, count)

    def write(self, batch: Batch, cells: np.ndarray) -> None:
        self.rows = self.sequences.place(batch).tolist()
        assert len(set(self.rows)) == len(self.rows), "two rows have one sequence"
        if self.has_streams:
            assert max(self.rows) - min(self.rows) < len(self.rows), "llama.cpp would read the weights several times"
        lost = len(self.batches) - 1 in self.lost_steps
        for row, sequence in enumerate(self.rows):
            if lost and row == batch.num_rows // 2:
                raise OutOfMemory("this step is lost")
            span = slice(*batch.row_starts[row : row + 2])
            ids = [sequence, sequence + self.spec.max_paths] if self.window else [sequence]
            self.memory.write(ids, batch.positions[span], cells[span][:, [0, 2]])

    def digests(self, batch: Batch, row: int, position: int) -> list[np.ndarray]:
        cells = self.memory.cells(self.rows[row])[: position + 1]
        positions = self.memory.positions[cells]
        assert positions.tolist() == list(range(position + 1))
        tokens = self.memory.tokens[cells]
        return [digest(tokens[:, 0], positions, tokens[:, 1])]


@dataclass
class StateDevice(TokenDevice):
    """The state of a row is a hash of the cells of its sequence."""

    memory: CellMemory = field(init=False)
    sequences: StateSequences = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.spec.num_states + self.spec.num_snapshots
        self.memory = CellMemory(count * self.spec.max_context, count)
        self.sequences = StateSequences(self.memory, count)

    def run_states(self, batch: Batch, tokens: np.ndarray, adapters: np.ndarray) -> list[np.ndarray]:
        after: list[np.ndarray] = []
        for row, sequence in enumerate(self.sequences.place(batch).tolist()):
            span = slice(*batch.row_starts[row : row + 2])
            self.memory.write([sequence], batch.positions[span], np.stack([tokens[span], adapters[span]], axis=1))
            state = np.zeros(1, np.uint32)
            states = []
            for token, adapter in self.memory.tokens[self.memory.cells(sequence)].tolist():
                state = next_state(state, token, adapter)
                states.append(state)
            after += states[batch.positions[span][0] :]
        return after
