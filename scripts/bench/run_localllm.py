"""A contestant (programs.py): this project's engine on its own CPU backend, steps as the daemon makes them.

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
from localllm.engine.modelfiles import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request


class Ours:
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
        held = runner.spec.weight_bytes
        self.hello: Answer = {
            "load_seconds": load_seconds,
            "peak": peak_memory(),
            "held": held,
            "read_per_step": held - runner.model.embedding.nbytes,  # of which a step reads a few rows
            "dtype": runner.spec.dtype,
        }
        self.engine = Engine(runner)
        self.vocab = runner.spec.vocab_size
        self.random = np.random.default_rng(0)
        self.asked = 0

    def do(self, kind: str, rows: int, context: int, tokens: int) -> Answer:
        if kind == "read":
            return self._read()
        start = time.perf_counter()
        for _ in range(rows):
            self.asked += 1
            prompt = tuple(self.random.integers(0, self.vocab, context).tolist())
            self.engine.submit(Request(str(self.asked), prompt, tokens + 1))
        answered = 0
        while answered < rows:
            answered += sum(len(delta.tokens) for delta in self.engine.step())
        assert answered == rows, "all prompts fit one step, so that all rows decode side by side"
        if kind == "prefill":
            return {"seconds": time.perf_counter() - start}
        start = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        return {"seconds": time.perf_counter() - start}

    def _read(self) -> Answer:
        if not hasattr(self, "ceilings"):  # their buffer is not part of what loading takes
            from localllm.kernels.benchmark.cpu_peaks import CpuPeaks

            self.ceilings = CpuPeaks()
        return {"seconds": self.ceilings.buffer / self.ceilings.read(), "bytes": self.ceilings.buffer}


if __name__ == "__main__":
    ours = Ours(**settings())
    serve(ours.hello, ours.do)
