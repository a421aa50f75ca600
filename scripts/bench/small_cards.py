"""Models of an 8B shape on GPUs with little memory: what is loaded, the context, and the peak of the memory.

`LOCALLLM_DEV_CUDA_MEMORY=8GiB python scripts/bench/small_cards.py --formats int4,int8`. Weights are random. For each
format the program loads the model with the default options, then computes the longest prompt of one step and decode
steps of all rows, first for the base model and then with an adapter in every slot. The result of a refused load has its
message and its hint.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from cuda_models import FORMATS
from lora import write_adapter
from rows import Row, parser, row, save
from shapes import SHAPES, Shape
from weights import stand_in

from localllm.backends import cuda
from localllm.backends.cuda.memory import free_memory
from localllm.engine.engine import Engine
from localllm.engine.errors import ModelRefused, SettingRefused
from localllm.engine.files.model_files import ModelFiles
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import Runner, RunnerSpec
from localllm.kernels.gpu.limits import gpu_limits

NEW_TOKENS = 16
MIB = 2**20
GIB = 2**30


def main() -> None:
    options = _options()
    save(options.save, measure(options), part=True)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder:
        files = stand_in(shape, Path(folder))
        for name in options.formats:
            yield _try(name, shape, files, LoadOptions(quant=FORMATS[name], context=options.context))  # type: ignore[arg-type]


def _try(name: str, shape: Shape, files: ModelFiles, options: LoadOptions) -> Row:
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
    adapters = []
    if spec.num_adapters:
        adapter = write_adapter(shape, options.adapter_rank, files.path)
        adapters = [replace(adapter, name=f"adapter {slot}") for slot in range(spec.num_adapters)]
    _run(runner, adapters)
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


def _run(runner: Runner, adapters: Sequence[Adapter]) -> None:
    """Steps of the base model, then steps with `adapters`."""
    engine = Engine(runner)
    for adapter in adapters:
        engine.register_adapter(adapter)
    _run_requests(engine, runner.spec, [None])
    if adapters:
        _run_requests(engine, runner.spec, adapters)


def _run_requests(engine: Engine, spec: RunnerSpec, adapters: Sequence[Adapter | None]) -> None:
    """The longest prompt of one step, then as many rows as the runner and its cache permit. The requests take turns
    with `adapters`; None is the base model."""
    rows = max(1, min(spec.max_rows, spec.cache_tokens // (4 * NEW_TOKENS)))
    longest = min(spec.max_tokens, spec.max_length - NEW_TOKENS)
    prompts = [(100,) * longest, *((row, row + 1, row + 2) for row in range(rows))]
    for key, prompt in enumerate(prompts):
        sampling = Sampling(temperature=1.0, top_p=0.9, logprobs=20 if key % 2 else None)
        adapter = adapters[key % len(adapters)]
        engine.submit(Request(f"r{key}", prompt, NEW_TOKENS, sampling=sampling, adapter=adapter))
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
