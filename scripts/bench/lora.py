"""Steps with adapters: time that 1, 8, 32 or 64 different adapters add to a decode step of the base model.

`python scripts/bench/lora.py --shape llama-8b --rows 64 --adapters 1,8,32,64`. Base model and adapters have random
weights; every linear layer has LoRA factors. All step kinds take turns in one run. "LoRA off" is a second runner
without adapter slots: base rows of a model with adapter slots should take no longer. The bound of an adapter step is
the base step, plus the bytes of its adapters divided by the read bandwidth, which is measured in the same run.
`--backend cpu --shape tiny --adapters 1,4 --rows 4` shows that everything runs.

`--prompt 32 --lora-backends csgmv,triton --adapters 8` compares LoRA backends in prefill: each row has a prompt of 32
tokens, and few adapters have most of the rows. The first backend of the list is the base of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rows import Row, row, save
from safetensors.torch import save_file
from shapes import SHAPES, Shape
from stepping import Stepped, Watched
from weights import stand_in

from localllm import backends
from localllm.engine.batch import Batch
from localllm.engine.engine import Engine
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import DeviceInfo, Runner, page_bytes


class Kind(NamedTuple):
    """A kind of step: the runner and the batch that it repeats."""

    runner: Runner
    batch: Batch


def linear_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of each linear layer."""
    heads = shape.heads * shape.head_dim
    kv_heads = shape.kv_heads * shape.head_dim
    return {
        "self_attn.q_proj": (shape.hidden, heads),
        "self_attn.k_proj": (shape.hidden, kv_heads),
        "self_attn.v_proj": (shape.hidden, kv_heads),
        "self_attn.o_proj": (heads, shape.hidden),
        "mlp.gate_proj": (shape.hidden, shape.inner),
        "mlp.up_proj": (shape.hidden, shape.inner),
        "mlp.down_proj": (shape.inner, shape.hidden),
    }


def write_adapter(shape: Shape, rank: int, folder: Path) -> Adapter:
    """Random factors for every linear layer, as PEFT writes them."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(shape.layers):
        for name, (in_features, out_features) in linear_sizes(shape).items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, in_features).bfloat16() * 0.01
            tensors[f"{module}.lora_B.weight"] = torch.randn(out_features, rank).bfloat16() * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    return Adapter("random", str(folder), read_adapter(folder).version)


def adapter_bytes(shape: Shape, rank: int) -> int:
    return 2 * rank * shape.layers * sum(sum(sizes) for sizes in linear_sizes(shape).values())


def step_seconds(runner: Runner, batch: Batch, count: int) -> float:
    """Seconds of one step: each starts before the results of the previous one are read."""
    batch = replace(batch, carry=np.arange(batch.num_rows, dtype=np.int32))
    pending = runner.run(batch)
    pending.result()
    start = time.perf_counter()
    pending = runner.run(batch)
    for _ in range(count - 1):
        following = runner.run(batch)
        pending.result()
        pending = following
    pending.result()
    return (time.perf_counter() - start) / count


def measure(shape: Shape, options: argparse.Namespace, folder: Path, read: float) -> list[Row]:
    """`read`: measured read bandwidth in bytes per second; 0: unknown."""
    backend = backends.load(options.backend)
    slots = max(options.adapters)
    context = 128 + 3 * options.steps
    page = page_bytes(16, shape.kv_heads, shape.head_dim, shape.layers, 2)
    load = LoadOptions(
        context=context,
        max_rows=options.rows,
        page_size=16,
        cache_bytes=page * (options.rows + 2) * (-(-context // 16) + 1) * 2,
        adapter_slots=slots,
        adapter_rank=options.rank,
    )
    files = stand_in(shape, folder)
    stepped = Stepped("base", backend.open(files, load))
    off = Stepped("LoRA off", backend.open(files, replace(load, adapter_slots=0)))
    adapter = write_adapter(shape, options.rank, folder)
    runner = stepped.watched.runner
    runner.prepare_adapter(adapter)
    start = time.perf_counter()
    for slot in range(1, slots + 1):
        runner.load_adapter(slot, adapter)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    load_seconds = (time.perf_counter() - start) / slots
    for each in (stepped, off):
        each.steady(options.rows, 64, options.steps)
    base = stepped.watched.batch
    plain_batch = off.watched.batch
    assert base is not None
    assert plain_batch is not None
    kinds = {"base": Kind(runner, base), "LoRA off": Kind(off.watched.runner, plain_batch)}
    for count in options.adapters:
        adapters = 1 + np.arange(options.rows, dtype=np.int32) % count
        kinds[f"{count} adapters"] = Kind(runner, replace(base, adapters=adapters))
    times = interleaved(kinds, options)
    label = f"{shape.name}, LoRA rank {options.rank}, {options.rows} rows"
    device = backend.probe()
    name = device.name if isinstance(device, DeviceInfo) else ""
    plain = statistics.median(times["base"])
    without = statistics.median(times["LoRA off"])
    rows = [
        row(f"{label}, LoRA off", 1e3 * without, "ms", device=name),
        row(
            f"{label}, base",
            1e3 * plain,
            "ms",
            ratio=without / plain,
            device=name,
            load_ms=round(1e3 * load_seconds, 1),
        ),
    ]
    for count in options.adapters:
        seconds = statistics.median(times[f"{count} adapters"])
        bound = plain + count * adapter_bytes(shape, options.rank) / read if read else 0.0
        more = {"added_ms": round(1e3 * (seconds - plain), 3), "bound_ms": round(1e3 * bound, 3)}
        ratio = plain / seconds
        rows.append(row(f"{label}, {count} adapters", 1e3 * seconds, "ms", ratio=ratio, device=name, **more))
    return rows


def measure_prefill(shape: Shape, options: argparse.Namespace, folder: Path) -> list[Row]:
    """A row for each LoRA backend. All backends have a runner of their own and take turns."""
    backend = backends.load(options.backend)
    tokens = options.rows * options.prompt
    page = page_bytes(16, shape.kv_heads, shape.head_dim, shape.layers, 2)
    load = LoadOptions(
        context=options.prompt + 16,
        max_rows=options.rows,
        max_step_tokens=tokens,
        page_size=16,
        cache_bytes=page * (options.rows + 2) * (options.prompt // 16 + 2) * 2,
        adapter_slots=max(options.adapters),
        adapter_rank=options.rank,
    )
    files = stand_in(shape, folder)
    adapter = write_adapter(shape, options.rank, folder)
    runners = {}
    for name in options.lora_backends:
        runners[name] = backend.open(files, replace(load, lora_backend=name))
        runners[name].prepare_adapter(adapter)
        for slot in range(1, max(options.adapters) + 1):
            runners[name].load_adapter(slot, adapter)
    first = next(iter(runners.values()))
    batch = replace(prefill_batch(first, options), adapters=skewed(options.rows, max(options.adapters)))
    times = interleaved({name: Kind(each, batch) for name, each in runners.items()}, options)
    device = backend.probe()
    device_name = device.name if isinstance(device, DeviceInfo) else ""
    label = f"{shape.name}, LoRA rank {options.rank}, prefill of {options.rows} x {options.prompt} tokens"
    label = f"{label}, {max(options.adapters)} adapters"
    base = statistics.median(times[options.lora_backends[0]])
    rows = []
    for name in runners:
        seconds = statistics.median(times[name])
        rows.append(row(f"{label}, {name}", 1e3 * seconds, "ms", ratio=base / seconds, device=device_name))
    return rows


def prefill_batch(runner: Runner, options: argparse.Namespace) -> Batch:
    """One step with the prompts of all rows."""
    watched = Watched(runner, overlap=False)
    engine = Engine(watched)
    generator = np.random.default_rng(0)
    for number in range(options.rows):
        prompt = tuple(generator.integers(0, runner.spec.vocab_size, options.prompt).tolist())
        engine.submit(Request(str(number), prompt, 1, Sampling()))
    engine.step()
    assert watched.batch is not None
    assert watched.batch.num_rows == options.rows, "the prompts do not fit in one step"
    return watched.batch


def skewed(rows: int, adapters: int) -> NDArray[np.int32]:
    """The adapter slot of each row: adapter k has a share of the rows in proportion to 1 / k."""
    shares = 1 / np.arange(1, adapters + 1)
    slots = np.random.default_rng(0).choice(adapters, rows, p=shares / shares.sum())
    return (slots + 1).astype(np.int32)


def interleaved(kinds: Mapping[str, Kind], options: argparse.Namespace) -> dict[str, list[float]]:
    """The seconds of a step of each kind, one value for each round. Every second round has the reverse order."""
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(options.rounds):
        order = list(kinds)
        for name in order[:: 1 if number % 2 == 0 else -1]:
            times[name].append(step_seconds(*kinds[name], options.steps))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=numbers, default=[1, 8, 32, 64], help="different adapters in one step")
    parser.add_argument("--prompt", type=int, default=0, help="prefill: tokens of each prompt; 0: decode steps")
    parser.add_argument("--lora-backends", type=lambda text: text.split(","), default=["csgmv", "triton"])
    parser.add_argument("--steps", type=int, default=24, help="steps of one turn")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each kind of step")
    parser.add_argument("--save", default="lora", help="name of the result file; empty: none")
    options = parser.parse_args()
    read = 0.0
    if torch.cuda.is_available():
        from gpu_peaks import peaks

        read = peaks().read
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[options.shape]
        if options.prompt:
            save(options.save, measure_prefill(shape, options, Path(folder)), part=True)
        else:
            save(options.save, measure(shape, options, Path(folder), read), part=True)


if __name__ == "__main__":
    main()
