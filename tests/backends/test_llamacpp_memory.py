"""The simulated cells of cell_device.py behave as the cells of real llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from llama_cpp import llama_cpp

from localllm.backends.llamacpp.cells import ContextMemory, StreamMemory

from .cell_device import FREE, CellMemory, StreamCells
from .gguf_models import write_canary
from .gguf_random import write_random
from .llama_decode import loaded

pytestmark = pytest.mark.real

CELLS, IDS = 256, 8


class Cells:
    """The cells of a context of llama.cpp."""

    def __init__(self, model: llama_cpp.llama_model_p, unified: bool = True) -> None:
        """`unified`: whether all sequences share the cells."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_batch = CELLS
        parameters.n_ctx = CELLS if unified else CELLS * IDS
        parameters.n_seq_max = IDS
        parameters.kv_unified = unified
        parameters.swa_full = True
        parameters.n_threads = parameters.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(model, parameters)
        self.memory = ContextMemory(self.context) if unified else StreamMemory(self.context)

    def write(self, ids: list[int], start: int, count: int) -> int:
        """Compute `count` tokens for sequences. Returns the code of llama_decode."""
        batch = llama_cpp.llama_batch_init(count, 0, len(ids))
        batch.n_tokens = count
        for index in range(count):
            batch.token[index] = index % 16
            batch.pos[index] = start + index
            batch.n_seq_id[index] = len(ids)
            for place, number in enumerate(ids):
                batch.seq_id[index][place] = number
            batch.logits[index] = 0
        code = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        return int(code)

    def range(self, sequence: int) -> tuple[int, int]:
        memory = llama_cpp.llama_get_memory(self.context)
        first = llama_cpp.llama_memory_seq_pos_min(memory, sequence)
        return first, llama_cpp.llama_memory_seq_pos_max(memory, sequence)


def simulated_range(cells: CellMemory, sequence: int) -> tuple[int, int]:
    positions = cells.positions[cells.cells(sequence)].tolist()
    return (positions[0], positions[-1]) if positions else (-1, -1)


def write_tiny(folder: Path, name: str) -> Path:
    return write_canary(folder) if name == "canary" else write_random(folder, name)


@pytest.mark.parametrize(("name", "pairs"), [("canary", False), ("gemma3", True)])
def test_ranges_of_positions_are_removed_and_copied(name: str, pairs: bool, tmp_path: Path) -> None:
    """`pairs`: each sequence has two ids, without which gemma's cells outside the window are overwritten."""
    rng = np.random.default_rng(1)
    count = IDS // 2 if pairs else IDS
    simulated = CellMemory(CELLS, IDS)
    with loaded(write_tiny(tmp_path, name)) as model:
        actual = Cells(model)
        for _ in range(300):
            sequence, other = rng.permutation(count)[:2].tolist()
            ids = [sequence, sequence + count] if pairs else [sequence]
            length = len(simulated.cells(sequence))
            choice = rng.random()
            if choice < 0.5:
                added = int(rng.integers(1, 30))
                fits = added <= CELLS - simulated.num_used
                assert actual.write(ids, length, added) == (0 if fits else 1)
                if fits:
                    simulated.write(ids, np.arange(length, length + added), np.zeros((added, 2)))
            elif choice < 0.75:
                start = int(rng.integers(0, length + 1))
                for number in ids:
                    for cells in (simulated, actual.memory):
                        cells.remove(number, start, -1)
            elif length:
                start = int(rng.integers(0, length))  # `other` first loses and then gets these positions
                for number in [other, other + count] if pairs else [other]:
                    for cells in (simulated, actual.memory):
                        cells.remove(number, 0, -1)
                        cells.copy(sequence, number, 0, length)
                        cells.remove(number, 0, start)
                        cells.copy(sequence, number, 0, start)
            assert [actual.range(each) for each in range(IDS)] == [
                simulated_range(simulated, each) for each in range(IDS)
            ]
        for cells in (simulated, actual.memory):
            for number in range(1, IDS):
                cells.remove(number, 0, -1)
            cells.remove(0, 0, -1)
        assert (simulated.positions == FREE).all()
        assert actual.write([0], 0, CELLS) == 0
        assert actual.write([1], 0, 1) == 1
        llama_cpp.llama_free(actual.context)


@pytest.mark.parametrize("name", ["canary", "gemma3"])
def test_streams_are_cut_and_their_beginnings_are_copied(name: str, tmp_path: Path) -> None:
    """A stream of gemma keeps the cells that its window has passed."""
    rng = np.random.default_rng(1)
    simulated = StreamCells(CELLS, IDS)
    with loaded(write_tiny(tmp_path, name)) as model:
        actual = Cells(model, unified=False)
        for _ in range(200):
            sequence, other = rng.permutation(IDS)[:2].tolist()
            length = len(simulated.cells(sequence))
            choice = rng.random()
            if choice < 0.6:
                added = min(int(rng.integers(1, 60)), CELLS - length)
                if added:
                    assert actual.write([sequence], length, added) == 0
                    simulated.write([sequence], np.arange(length, length + added), np.zeros((added, 2)))
            elif choice < 0.75:
                start = int(rng.integers(0, length + 1))
                for cells in (simulated, actual.memory):
                    cells.remove(sequence, start, -1)
            elif length:
                end = int(rng.integers(1, length + 1))
                for cells in (simulated, actual.memory):
                    cells.remove(other, 0, -1)
                    cells.copy(sequence, other, 0, end)
            assert [actual.range(each) for each in range(IDS)] == [
                simulated_range(simulated, each) for each in range(IDS)
            ]
        llama_cpp.llama_free(actual.context)
