"""A program (programs.py): llama.cpp through llama-cpp-python, with the calls of llama-batched-bench.

Settings: file, threads, gpu (compute all layers on the GPU).
LLAMA_CPP_LIB_PATH: the folder of llama.cpp's libraries, if not that of the package.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from programs import Answer, peak_memory, serve, settings

BATCH = 2048  # tokens of a call, and of a micro-batch on a GPU
CPU_BATCH = 512  # tokens of a micro-batch on a CPU
POSITIONS = 256  # llama.cpp rounds the number of positions of a row up to a multiple of this number


class Entries:
    """Rows of llama.cpp's batch: arrays with BATCH elements, which `batch` references."""

    def __init__(self, llama: Any) -> None:
        self._tokens = np.zeros(BATCH, np.int32)
        self._positions = np.zeros(BATCH, np.int32)
        self._counts = np.ones(BATCH, np.int32)
        self._rows = np.zeros(BATCH, np.int32)
        self._row_addresses = self._rows.ctypes.data + 4 * np.arange(BATCH, dtype=np.uint64)
        self._logits = np.zeros(BATCH, np.int8)
        self._random = np.random.default_rng(0)
        int_pointer = ctypes.POINTER(ctypes.c_int32)
        self.batch = llama.llama_batch(
            token=self._tokens.ctypes.data_as(int_pointer),
            pos=self._positions.ctypes.data_as(int_pointer),
            n_seq_id=self._counts.ctypes.data_as(int_pointer),
            seq_id=self._row_addresses.ctypes.data_as(ctypes.POINTER(int_pointer)),
            logits=self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, rows: NDArray[Any], positions: NDArray[Any], needs_logits: NDArray[Any], vocab: int) -> None:
        """Random tokens at these positions of these rows."""
        count = len(rows)
        self.batch.n_tokens = count
        self._tokens[:count] = self._random.integers(0, vocab, count)
        self._positions[:count] = positions
        self._rows[:count] = rows
        self._logits[:count] = needs_logits


def library() -> Any:
    """llama_cpp, initialised."""
    # Some builds of llama.cpp contain a copy of the C++ library, which must not differ from that of numpy.
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    import llama_cpp

    libraries = Path(os.environ.get("LLAMA_CPP_LIB_PATH", Path(llama_cpp.__file__).parent / "lib"))
    ggml = ctypes.CDLL(str(libraries / "libggml.so"))
    if not ggml.ggml_backend_dev_count():  # the package has a library for each kind of CPU
        ggml.ggml_backend_load_all_from_path(str(libraries).encode())
    llama_cpp.llama_backend_init()
    return llama_cpp


class LlamaCpp:
    """One loaded model. Its steps draw no tokens."""

    def __init__(self, file: str, threads: int, gpu: bool) -> None:
        self._llama = library()
        self._silent = self._llama.llama_log_callback(lambda level, text, data: None)  # must outlive the model
        self._llama.llama_log_set(self._silent, None)
        start = time.perf_counter()
        parameters = self._llama.llama_model_default_params()
        parameters.load_mode = self._llama.LLAMA_LOAD_MODE_NONE
        parameters.n_gpu_layers = -1 if gpu else 0
        self._model = self._llama.llama_model_load_from_file(file.encode(), parameters)
        assert self._model, file
        self.hello: Answer = {"load_seconds": time.perf_counter() - start, "peak_bytes": peak_memory()}
        self._threads = threads
        self._ubatch = BATCH if gpu else CPU_BATCH
        self._vocab = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self._model))
        self._entries = Entries(self._llama)
        self._limits = 0, 0  # rows, and positions of each row
        self._contexts: list[Any] = []  # with flash attention, and without

    def do(self, kind: str, rows: int, context: int, steps: int, adapters: int) -> Answer:
        """Measure with and without flash attention. The result is the smaller time."""
        limits = rows, -(-(context + steps) // POSITIONS) * POSITIONS
        if limits != self._limits:
            for opened in self._contexts:
                self._llama.llama_free(opened)
            self._limits = limits
            self._contexts = [self._open(kind, *limits) for kind in ("ENABLED", "DISABLED")]
        measure = self._prefill if kind == "prefill" else self._steps
        return {"seconds": min(measure(opened, rows, context, steps) for opened in self._contexts)}

    def _open(self, flash: str, rows: int, positions: int) -> Any:
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx = positions * rows
        parameters.n_seq_max = rows
        parameters.n_batch = BATCH
        parameters.n_ubatch = self._ubatch
        parameters.n_threads = self._threads
        parameters.n_threads_batch = self._threads
        parameters.flash_attn_type = getattr(self._llama, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
        context = self._llama.llama_init_from_model(self._model, parameters)
        assert context
        return context

    def _steps(self, opened: Any, rows: int, context: int, steps: int) -> float:
        """The seconds of the steps after the prompts."""
        self._prefill(opened, rows, context, steps)
        every_row = np.arange(rows)
        start = time.perf_counter()
        for position in range(context, context + steps):
            self._decode(opened, every_row, np.full(rows, position), np.ones(rows))
        return time.perf_counter() - start

    def _prefill(self, opened: Any, rows: int, context: int, steps: int) -> float:
        """The seconds of a random prompt of `context` tokens in each row."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(opened), False)
        all_rows = np.repeat(np.arange(rows), context)
        positions = np.tile(np.arange(context), rows)
        start = time.perf_counter()
        for first in range(0, rows * context, BATCH):
            chunk = slice(first, first + BATCH)
            self._decode(opened, all_rows[chunk], positions[chunk], positions[chunk] == context - 1)
        return time.perf_counter() - start

    def _decode(self, opened: Any, rows: NDArray[Any], positions: NDArray[Any], needs_logits: NDArray[Any]) -> None:
        """Compute random tokens at these positions of these rows."""
        self._entries.fill(rows, positions, needs_logits, self._vocab)
        if self._llama.llama_decode(opened, self._entries.batch):
            raise RuntimeError("llama_decode failed")
        self._llama.llama_synchronize(opened)


if __name__ == "__main__":
    program = LlamaCpp(**settings(__doc__))
    serve(program.hello, program.do)
