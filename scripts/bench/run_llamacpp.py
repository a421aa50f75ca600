"""A program (programs.py): llama.cpp through llama-cpp-python, with the calls of llama-batched-bench.

Settings: file, threads, rows, context, mmap. Options of a job: flash (flash attention) and ubatch.
"""

from __future__ import annotations

import ctypes
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

from programs import Answer, peak_memory, serve, settings

BATCH = 2048


class LlamaCpp:
    """One loaded model, with a context for each choice of options."""

    def __init__(self, file: str, threads: int, rows: int, context: int, mmap: bool) -> None:
        import llama_cpp

        self._llama = llama_cpp
        # The package may have a library for each kind of CPU; this call loads the best of them.
        libraries = Path(self._llama.__file__).parent / "lib"
        ctypes.CDLL(str(libraries / "libggml.so")).ggml_backend_load_all_from_path(str(libraries).encode())
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # must outlive the model
        llama_cpp.llama_log_set(self._silent, None)
        self._llama.llama_backend_init()
        start = time.perf_counter()
        parameters = self._llama.llama_model_default_params()
        parameters.load_mode = self._llama.LLAMA_LOAD_MODE_MMAP if mmap else self._llama.LLAMA_LOAD_MODE_NONE
        self.model = self._llama.llama_model_load_from_file(file.encode(), parameters)
        assert self.model, file
        self.load_seconds = time.perf_counter() - start
        self.threads = threads
        self.rows = rows
        self.context = context
        self.vocab = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self.model))
        self.name = llama_cpp.llama_print_system_info().decode()
        self.batch = self._llama.llama_batch_init(BATCH, 0, 1)

    @cache  # noqa: B019
    def opened(self, flash: bool, ubatch: int) -> Any:
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx = self.context * self.rows
        parameters.n_seq_max = self.rows
        parameters.n_batch = BATCH
        parameters.n_ubatch = ubatch
        parameters.n_threads = self.threads
        parameters.n_threads_batch = self.threads
        parameters.flash_attn_type = self._llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if flash:
            parameters.flash_attn_type = self._llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context = self._llama.llama_init_from_model(self.model, parameters)
        assert context
        return context

    def do(self, kind: str, rows: int, context: int, tokens: int, flash: bool = True, ubatch: int = 512) -> Answer:
        opened = self.opened(flash, ubatch)
        self._llama.llama_memory_clear(self._llama.llama_get_memory(opened), False)
        start = time.perf_counter()
        prompt = [(row, position, position == context - 1) for row in range(rows) for position in range(context)]
        for first in range(0, len(prompt), BATCH):
            self._decode(opened, prompt[first : first + BATCH])
        if kind == "prefill":
            return {"seconds": time.perf_counter() - start}
        start = time.perf_counter()
        for position in range(context, context + tokens):
            self._decode(opened, [(row, position, True) for row in range(rows)])
        return {"seconds": time.perf_counter() - start}

    def _decode(self, opened: Any, entries: list[tuple[int, int, bool]]) -> None:
        """Compute random tokens at these (row, position, needs logits)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (row, position, needs_logits) in enumerate(entries):
            batch.token[index] = random.randrange(self.vocab)
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = needs_logits
        if self._llama.llama_decode(opened, batch):
            raise RuntimeError("llama_decode failed")
        self._llama.llama_synchronize(opened)


if __name__ == "__main__":
    program = LlamaCpp(**settings(__doc__))
    serve({"load_seconds": program.load_seconds, "peak": peak_memory(), "name": program.name}, program.do)
