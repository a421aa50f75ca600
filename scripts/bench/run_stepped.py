"""A program (programs.py): a model with random weights on an NVIDIA GPU, through the engine.

Settings: shape (a name in SHAPES), quant ("none" for none), rows, context. LOCALLLM_CUDA_LIBRARY: the CUDA library.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from programs import Answer, serve, settings
from shapes import SHAPES
from stepping import Stepped
from weights import stand_in

from localllm.backends import cuda
from localllm.engine.options import LoadOptions
from localllm.engine.runner import page_bytes
from localllm.kernels.triton.problem import triton_problem

PAGE = 16


class Model:
    """One loaded model; its weights are the same in all processes."""

    def __init__(self, shape: str, quant: str, rows: int, context: int) -> None:
        sizes = SHAPES[shape]
        page = page_bytes(PAGE, sizes.kv_heads, sizes.head_dim, sizes.layers, 2)
        options = LoadOptions(
            quant=quant,  # type: ignore[arg-type]
            context=context,
            max_rows=rows,
            max_step_tokens=8192,
            page_size=PAGE,
            cache_bytes=page * rows * (context // PAGE + 2),
        )
        with tempfile.TemporaryDirectory() as folder:
            files = stand_in(sizes, Path(folder))
            start = time.perf_counter()
            runner = cuda.open(files, options)
            seconds = time.perf_counter() - start
            self._stepped = Stepped("model", runner)
        self.hello: Answer = {
            "load_seconds": seconds,
            "warnings": runner.spec.warnings,
            "triton_problem": str(triton_problem()),
        }

    def do(self, kind: str, rows: int, context: int, tokens: int) -> Answer:
        if kind == "prefill":
            launched = self._stepped.watched.seconds
            allocations = torch.cuda.memory_stats().get("num_device_alloc", 0)
            seconds = self._stepped.first_token(context)
            return {
                "seconds": seconds,
                "launch_seconds": self._stepped.watched.seconds - launched,
                "allocations": torch.cuda.memory_stats().get("num_device_alloc", 0) - allocations,
            }
        self._stepped.steady(rows, context, tokens)
        return {"seconds": tokens * self._stepped.steps(tokens)}


if __name__ == "__main__":
    program = Model(**settings(__doc__))
    serve(program.hello, program.do)
