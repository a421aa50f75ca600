"""A program (programs.py): localllm's engine on any backend; it makes steps as the daemon's thread does.

Settings: model (a name in SHAPES, "guide", or a GGUF file), folder (for random weights), backend, options (fields of
LoadOptions), adapters (number of random adapters, in as many slots).
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from programs import Answer, peak_memory, serve, settings
from shapes import SHAPES
from weights import stand_in, write_adapter

from localllm import backends
from localllm.app import paths
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request

WARMUP = 4  # steps before the timed steps
Trace = AbstractContextManager[Any]
MIN_TOKENS = 100  # in and out of a request of random length


def open_files(model: str, folder: Path) -> ModelFiles:
    if model == "guide":
        return read_model(paths.guide_dir(), model)
    return stand_in(SHAPES[model], folder) if model in SHAPES else read_model(Path(model))


def random_requests(requests: int, longest: int) -> tuple[list[int], list[int]]:
    """(length of each prompt, number of tokens to generate for each). Seed and order of the draws are those of
    nano-vllm's benchmark: for 256 requests of up to 1,024 tokens, 142,827 tokens in and 133,966 out."""
    drawn = random.Random(0)
    shortest = min(MIN_TOKENS, longest)
    lengths = []
    for _ in range(requests):
        lengths.append(drawn.randint(shortest, longest))
        for _ in range(lengths[-1]):
            drawn.randint(0, 10_000)  # the tokens of the prompt
    return lengths, [drawn.randint(shortest, longest) for _ in range(requests)]


class Localllm:
    """One loaded model. The methods that are kinds of jobs return their answers."""

    def __init__(self, model: str, folder: str, backend: str, options: dict[str, Any], adapters: int = 0) -> None:
        files = open_files(model, Path(folder))
        choice = backends.choose(backend, files)
        start = time.perf_counter()
        runner = choice.backend.open(files, LoadOptions(**options))
        seconds = time.perf_counter() - start
        spec = runner.spec
        self.hello: Answer = {
            "device": "" if choice.info.main_memory else choice.info.name,
            "load_seconds": seconds,
            "peak_bytes": peak_memory(),
            "weight_bytes": spec.weight_bytes,
            "cache_bytes": spec.cache_bytes,
            "step_bytes": spec.token_bytes,  # that each step reads, without the cache
            "position_bytes": spec.cache_bytes / spec.cache_tokens,
            "dtype": spec.dtype,
            "context": spec.max_context,
            "adapter_slots": spec.num_adapters,
            "graph_seconds": getattr(runner, "capture_seconds", 0.0),
            "warnings": spec.warnings,
        }
        self._backend = choice.backend
        self._spec = spec
        self._engine = Engine(runner)
        self._random = np.random.default_rng(0)
        self._submitted = 0
        if adapters:
            first = write_adapter(SHAPES[model], LoadOptions().adapter_rank, Path(folder) / "adapter")
            self._adapters = [replace(first, name=f"adapter {number}") for number in range(adapters)]
            for adapter in self._adapters:
                self._engine.register_adapter(adapter)
        gc.collect()
        gc.freeze()  # as the worker does

    def do(self, kind: str, rows: int, context: int, steps: int, adapters: int) -> Answer:
        answer: Answer = getattr(self, kind)(rows, context, steps, adapters)
        return answer

    def prefill(self, rows: int, context: int, steps: int, adapters: int) -> Answer:
        start = time.perf_counter()
        self._submit([context] * rows, [1] * rows, adapters)
        self._finish()
        return {"seconds": time.perf_counter() - start}

    def hit(self, rows: int, context: int, steps: int, adapters: int) -> Answer:
        """`prefill` of prompts that were computed before."""
        seed = int(self._random.integers(2**31))
        for _ in range(2):
            self._random = np.random.default_rng(seed)
            answer = self.prefill(rows, context, steps, adapters)
        return answer

    def decode(self, rows: int, context: int, steps: int, adapters: int, trace: Trace = nullcontext()) -> Answer:
        """`trace` is entered for the timed steps."""
        lead = -(-rows * context // self._spec.max_tokens)  # steps of the first row until the last row has its prompt
        ids = self._submit([context] * rows, [lead + 2 * WARMUP + steps] * rows, adapters)
        answered: set[str] = set()
        while len(answered) < rows and self._engine.has_work:
            answered.update(delta.request_id for delta in self._engine.step() if delta.tokens)
        for _ in range(WARMUP):
            self._engine.step()
        with trace:
            start = time.perf_counter()
            tokens = sum(len(delta.tokens) for _ in range(steps) for delta in self._engine.step())
            seconds = time.perf_counter() - start
        assert tokens == rows * steps, "the rows did not all decode: the cache is too small"
        for each in ids:
            self._engine.cancel(each)
        self._finish()
        return {"seconds": seconds}

    def profile(self, *job: int) -> Answer:
        """Like `decode`, but slower, with a trace."""
        from torch.profiler import profile

        trace = profile()
        answer = self.decode(*job, trace=trace)
        by_device = trace.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=90)
        print(by_device, file=sys.stderr)
        return answer

    def requests(self, rows: int, context: int, steps: int, adapters: int) -> Answer:
        prompts, counts = random_requests(rows, context)
        start = time.perf_counter()
        self._submit(prompts, counts, adapters)
        tokens = self._finish()
        assert tokens == sum(counts), f"{tokens} tokens of {sum(counts)}"
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def read(self, *job: int) -> Answer:
        """The bandwidth in bytes per second; 0 if the backend cannot measure it."""
        start = time.perf_counter()
        bandwidth = self._backend.read_bandwidth() or 0.0
        return {"seconds": time.perf_counter() - start, "bandwidth": bandwidth}

    def _submit(self, lengths: Sequence[int], counts: Sequence[int], adapters: int) -> list[str]:
        """Requests with random prompts, which have no prefix hits."""
        ids = []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self._submitted += 1
            ids.append(str(self._submitted))
            prompt = tuple(self._random.integers(0, self._spec.vocab_size, length).tolist())
            adapter = self._adapters[row % adapters] if adapters else None
            self._engine.submit(Request(ids[-1], prompt, count, adapter=adapter))
        return ids

    def _finish(self) -> int:
        """Step until no request is left. Returns the number of tokens. Raises RuntimeError if a request failed."""
        tokens = 0
        while self._engine.has_work:
            for delta in self._engine.step():
                tokens += len(delta.tokens)
                if delta.error:
                    raise RuntimeError(delta.error)
        return tokens


if __name__ == "__main__":
    program = Localllm(**settings(__doc__))
    serve(program.hello, program.do)
