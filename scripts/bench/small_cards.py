"""Models of an 8B shape on GPUs with little memory: what is loaded, the context, and the peak of the memory.

`LOCALLLM_DEV_CUDA_MEMORY=8GiB python scripts/bench/small_cards.py --formats int4,int8`. Weights are random. For each
format the program loads the model with the default options, then computes a prompt of 2,048 tokens and decode steps of
one row and of all rows. The result of a refused load has its message and its hint.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from cuda_models import FORMATS
from rows import Row, parser, row, save
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
from localllm.kernels.gpu_limits import gpu_limits

PROMPT = 2048
NEW_TOKENS = 16
MIB = 2**20
GIB = 2**30


def main() -> None:
    options = _options()
    save(options.save, measure(options), part=True)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        files = stand_in(SHAPES[options.shape], Path(folder))
        for name in options.formats:
            yield _try(name, files, LoadOptions(quant=FORMATS[name], context=options.context))  # type: ignore[arg-type]


def _try(name: str, files: ModelFiles, options: LoadOptions) -> Row:
    """The context of a loaded model, with its memory in MiB; 0 tokens for a refused load."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _, total = gpu_limits().limit_memory(*torch.cuda.mem_get_info())
    title = f"{files.name}, {name}, GPU of {total / GIB:.1f} GiB, context"
    gpu = torch.cuda.get_device_name()
    start = time.perf_counter()
    try:
        plan = cuda.plan_memory(files, options)
        runner = cuda.open(files, options)
    except (ModelRefused, SettingRefused) as error:
        return row(title, 0, "tokens", device=gpu, refused=f"{error}; {error.hint}")
    seconds = time.perf_counter() - start
    spec = runner.spec
    loaded = torch.cuda.max_memory_reserved()
    _run(runner)
    figure = row(
        title,
        spec.max_context,
        "tokens",
        device=gpu,
        planned_context=plan.largest_context(),
        free_before=plan.free // MIB,
        weights=spec.weight_bytes // MIB,
        planned_weights=plan.weights // MIB,
        planned_workspace=plan.workspace // MIB,
        cache=spec.cache_bytes // MIB,
        adapter_slots=spec.num_adapters,
        peak_after_load=loaded // MIB,
        peak_after_steps=torch.cuda.max_memory_reserved() // MIB,
        free_after_steps=free_memory() // MIB,
        load_seconds=round(seconds, 1),
        warnings=spec.warnings,
    )
    runner.close()
    return figure


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
    arguments.add_argument("--save", default="cuda_small_cards", help="name of the file of results; empty: none")
    return arguments.parse_args()


if __name__ == "__main__":
    main()
