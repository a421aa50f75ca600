"""A program (programs.py): the engine on the CPU backend; it makes steps as the daemon does.

Settings: folder, threads, quant ("none" for none), packed (folder for packed weights, or null), rows, context.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from programs import Answer, peak_memory, serve, settings

from localllm.backends import cpu
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request


class Localllm:
    """One loaded model."""

    def __init__(self, folder: str, threads: int, quant: str, packed: str | None, rows: int, context: int) -> None:
        budget = LoadOptions(
            context=context,
            max_rows=rows,
            max_step_tokens=2048,
            quant=quant,  # type: ignore[arg-type]
            packed_dir=Path(packed) if packed else None,
            threads=threads,
        )
        start = time.perf_counter()
        runner: Any = cpu.open(read_model(folder), budget)
        load_seconds = time.perf_counter() - start
        self.hello: Answer = {
            "load_seconds": load_seconds,
            "peak": peak_memory(),
            "weight_bytes": runner.spec.weight_bytes,
            "read_per_step": runner.spec.token_bytes,
            "dtype": runner.spec.dtype,
        }
        self.engine = Engine(runner)
        self.vocab = runner.spec.vocab_size
        self.random = np.random.default_rng(0)
        self.requests = 0
        self.peaks: Any = None

    def do(self, kind: str, rows: int, context: int, tokens: int) -> Answer:
        if kind == "read":
            return self._read()
        start = time.perf_counter()
        for _ in range(rows):
            self.requests += 1
            prompt = tuple(self.random.integers(0, self.vocab, context).tolist())
            self.engine.submit(Request(str(self.requests), prompt, tokens + 1))
        answered = 0
        while answered < rows:
            answered += sum(len(delta.tokens) for delta in self.engine.step())
        assert answered == rows, "the prompts do not fit one step, so the rows do not decode in parallel"
        if kind == "prefill":
            return {"seconds": time.perf_counter() - start}
        start = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return {"seconds": time.perf_counter() - start}

    def _read(self) -> Answer:
        if self.peaks is None:  # created late: the memory of loading must not include its buffer
            from cpu_peaks import CpuPeaks

            self.peaks = CpuPeaks()
        return {"seconds": self.peaks.buffer / self.peaks.read(), "bytes": self.peaks.buffer}


if __name__ == "__main__":
    program = Localllm(**settings(__doc__))
    serve(program.hello, program.do)
