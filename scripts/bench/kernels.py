"""Every kernel of the CPU or of an NVIDIA GPU, beside torch and its bound.

`python scripts/bench/kernels.py [--device cuda] [--shape llama-8b] [--families linear,attention] [--formats int8]
[--rows 1,512] [--threads 1,2]`. `ours` and `peer` (torch in the dtype of the activations) are microseconds.
`bound_share` is the share of the bound, and `bound` the peak rate that sets it: `read`, or a kind of instruction. Every
call has its own arguments, which are together larger than the caches. Results are medians; kernel and torch alternate.
On a GPU, unset LOCALLLM_CUDA_LIBRARY and remove the built library to measure the Triton kernels.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from peaks import Cpu, Cuda, Device
from rows import Row, numbers, parser, row, save, words
from shapes import SHAPES
from works import FORMATS, REFERENCES, Work, families

from localllm.backends.machine import cores
from localllm.kernels.ops.cases.reference_check import copy_to, pack_value

MAX_SETS = 64  # maximum number of argument sets
ROUNDS = 5  # measurements of the op and of torch
MIN_BOUND = 3e-6  # seconds; if the bound is shorter, the overhead of a call dominates


def main() -> None:
    arguments = parser(__doc__, "kernels")
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    arguments.add_argument("--experts", choices=SHAPES, default="moe-1b", help="the mixture of experts of family moe")
    arguments.add_argument(
        "--families", type=words, help="linear, moe, attention, latent, elements, lora, sampling, state"
    )
    arguments.add_argument("--formats", type=words, default=list(FORMATS))
    arguments.add_argument("--rows", type=numbers, default=[1, 16, 128, 512])
    arguments.add_argument(
        "--threads", type=numbers, default=[cores()], help="numbers of threads of a CPU, such as 1,2"
    )
    options = arguments.parse_args()
    devices = (Cpu(threads) for threads in options.threads) if options.device == "cpu" else [Cuda()]
    save(options.save, chain.from_iterable(measure(device, options) for device in devices))


@torch.inference_mode()
def measure(device: Device, options: argparse.Namespace) -> Iterator[Row]:
    threads = "" if device.name else f", {torch.get_num_threads()} threads"
    yield row(f"ceiling, read{threads}", device.read() / 1e9, "GB/s", device=device.name)
    for kind, rate in device.rates.items():
        yield row(f"ceiling, {kind}{threads}", rate / 1e9, "GOP/s", device=device.name)
    shapes = SHAPES[options.shape], SHAPES[options.experts]
    by_family = families(*shapes, options.formats, options.rows, device.dtype)
    for family in options.families or by_family:
        for work in by_family[family]:
            yield row(f"{work.op}, {work.label}{threads}", unit="µs", device=device.name, **figures(work, device))


def figures(work: Work, device: Device) -> dict[str, Any]:
    """The results of one work."""
    timers = _timers(work, device)
    rounds = [{name: timer() for name, timer in timers.items()} for _ in range(ROUNDS)]
    seconds = {name: statistics.median(each[name] for each in rounds) for name in timers}
    fastest = max(work.kinds, key=lambda kind: device.rates.get(kind, 0.0))
    bounds = {
        "read": work.bytes / seconds.pop("read"),
        fastest: work.operations / device.rates.get(fastest, math.inf),
    }
    bound = max(bounds, key=bounds.__getitem__)
    facts: dict[str, Any] = {name: 1e6 * value for name, value in seconds.items()} | {"bound": bound}
    if "peer" in seconds:
        facts["ratio"] = seconds["peer"] / seconds["ours"]
    if bounds[bound] >= MIN_BOUND:
        facts["bound_share"] = bounds[bound] / seconds["ours"]
    return facts


def _timers(work: Work, device: Device) -> dict[str, Callable[[], float]]:
    """Functions that return the seconds of the op and of torch, and the read bandwidth."""
    sets = min(MAX_SETS, max(2, round(device.beyond_caches / work.bytes)))
    plain = [copy_to(work.make(), device.torch_name) for _ in range(sets)]
    packed = [_packed(work, arguments, device) for arguments in plain]
    timers = {"ours": device.timer(dict(device.ops)[work.op], packed), "read": device.read}
    try:
        timers["peer"] = device.timer(work.reference or REFERENCES[work.op], plain)
    except RuntimeError as error:  # a graph cannot have some calls of torch
        print(f"{work.op}, {work.label}: torch: {str(error)[:100]}", file=sys.stderr)
    return timers


def _packed(work: Work, arguments: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """With packed weights."""
    return {
        name: pack_value(device.ops, value, device.dtype) if name in work.packs else value
        for name, value in arguments.items()
    }


if __name__ == "__main__":
    main()
