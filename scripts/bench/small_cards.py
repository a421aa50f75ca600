"""Models of an 8B shape on GPUs with little memory: what is loaded, the context, and the peak of the memory.

`LOCALLLM_DEV_CUDA_MEMORY=8GiB python scripts/bench/small_cards.py --formats int4,int8`. Weights are random. For each
format the program loads the model with the default options, then computes a prompt of 2,048 tokens and decode steps of
one row and of all rows. A refused load prints its message and its hint.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path

import torch
from cuda_models import FORMATS
from rows import parser
from shapes import SHAPES
from weights import stand_in

from localllm.backends import cuda
from localllm.backends.cuda.memory import free_memory
from localllm.engine.engine import Engine
from localllm.engine.errors import ModelRefused, SettingRefused
from localllm.engine.modelfiles import ModelFiles
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import Runner

PROMPT = 2048
NEW_TOKENS = 16
MIB = 2**20


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        files = stand_in(SHAPES[options.shape], Path(folder))
        for name in options.formats:
            _try(name, files, LoadOptions(quant=FORMATS[name], context=options.context))  # type: ignore[arg-type]


def _try(name: str, files: ModelFiles, options: LoadOptions) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    try:
        plan = cuda.plan_memory(files, options)
        runner = cuda.open(files, options)
    except (ModelRefused, SettingRefused) as error:
        print(f"{name}: refused: {error}; {error.hint}", flush=True)
        return
    seconds = time.perf_counter() - start
    spec = runner.spec
    loaded = torch.cuda.max_memory_reserved()
    _run(runner)
    free = free_memory()
    print(
        f"{name}: free {plan.free // MIB}, weights {spec.weight_bytes // MIB} (planned {plan.weights // MIB}), "
        f"planned workspace {plan.workspace // MIB}, cache {spec.cache_bytes // MIB} MiB; context {spec.max_context} "
        f"(planned {plan.largest_context()}), adapter slots {spec.num_adapters}; peak after the load "
        f"{loaded // MIB}, after the steps {torch.cuda.max_memory_reserved() // MIB} MiB; still free "
        f"{free // MIB} MiB; loaded in {seconds:.1f} s; {spec.warnings}",
        flush=True,
    )
    runner.close()


def _run(runner: Runner) -> None:
    """A prompt of PROMPT tokens, then as many rows as the runner and its cache permit."""
    engine = Engine(runner)
    rows = max(1, min(runner.spec.max_rows, runner.spec.cache_tokens // (4 * NEW_TOKENS)))
    longest = min(PROMPT, runner.spec.max_length - NEW_TOKENS)
    prompts = [tuple(range(100, 100 + longest)), *((row, row + 1, row + 2) for row in range(rows))]
    for key, prompt in enumerate(prompts):
        sampling = Sampling(temperature=1.0, top_p=0.9, logprobs=20 if key % 2 else None)
        engine.submit(Request(f"r{key}", prompt, NEW_TOKENS, sampling=sampling))
        if not key:
            _finish(engine)
    _finish(engine)


def _finish(engine: Engine) -> None:
    while engine.has_work:
        for delta in engine.step():
            if delta.error:
                raise RuntimeError(delta.error)


def _options() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="llama-8b")
    arguments.add_argument("--formats", type=lambda text: text.split(","), default=["bf16", "int8", "int4"])
    arguments.add_argument("--context", type=int, default=None)
    return arguments.parse_args()


if __name__ == "__main__":
    main()
