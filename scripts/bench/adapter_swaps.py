"""Loads of adapters to the device while other requests decode.

`python scripts/bench/adapter_swaps.py --shape llama-8b --streams 63 --swaps 200`. The streams decode with six adapters.
Beside them run short requests, one at a time: for the base model, for an adapter in a slot, and for an adapter that
must be loaded (a swap). The rows tell the time of a load beside that of a plain copy of the same bytes, the steps of
the streams with and without a load in progress, the time to the first token of each kind of request, and a step of the
base model before the first adapter and after all loads. `--backend cpu --shape tiny --streams 3` shows that everything
runs.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lora import write_adapter
from rows import Row, parser, row, save
from shapes import SHAPES, Shape
from weights import stand_in

from localllm import backends
from localllm.backends.pytorch.lora import slot_values
from localllm.backends.pytorch.opening import DTYPES
from localllm.engine.batch import Batch
from localllm.engine.engine import Engine
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.request import Delta, Request
from localllm.engine.runner import DeviceInfo, Pending, Runner, StepResult, page_bytes

STREAM_ADAPTERS = 6  # adapters of the streams, each in a slot
SWAP_SLOTS = 2
SWAP_ADAPTERS = 4  # more than their slots, so each swap loads its adapter
GROUP = 50  # swaps until the streams begin again, so that their contexts stay short
CONTEXT = 1024
COPIES = 20  # plain copies that are timed
BEGIN = time.perf_counter()


class Interval(NamedTuple):
    """Start and end in seconds."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def overlaps(self, other: Interval) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass
class Timed:
    """A runner that records the time of each result and of each load."""

    runner: Runner
    ends: list[float] = field(default_factory=list)
    loads: list[Interval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = self.runner.spec
        self.prepare_adapter = self.runner.prepare_adapter
        self.forget_adapter = self.runner.forget_adapter
        self.close = self.runner.close

    def run(self, batch: Batch) -> TimedPending:
        return TimedPending(self.runner.run(batch), self.ends)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        start = time.perf_counter()
        self.runner.load_adapter(slot, adapter)
        self.loads.append(Interval(start, time.perf_counter()))

    def steps(self, first: int) -> list[Interval]:
        """The time between results, from the result with the index `first`."""
        ends = self.ends[first:]
        return [Interval(start, end) for start, end in pairwise(ends)]


@dataclass
class TimedPending:
    pending: Pending
    ends: list[float]

    def result(self) -> StepResult:
        result = self.pending.result()
        self.ends.append(time.perf_counter())
        return result


class Load:
    """Requests on a started engine."""

    def __init__(self, runner: Runner) -> None:
        self.timed = Timed(runner)
        self.engine = Engine(self.timed, self._add)
        self._changed = threading.Condition()
        self._first: dict[str, float] = {}  # time of the first token of each request
        self._unfinished: set[str] = set()
        self._number = 0
        self._random = random.Random(0)
        self.engine.start()

    def streams(self, count: int, adapters: Sequence[Adapter | None]) -> list[str]:
        """Start requests that decode until `stop`. Returns when all of them decode."""
        names = [self._submit(adapters[number % len(adapters)], CONTEXT - 8) for number in range(count)]
        with self._changed:
            assert self._changed.wait_for(lambda: all(name in self._first for name in names), timeout=120)
        return names

    def stop(self, names: Sequence[str]) -> None:
        for name in names:
            self.engine.cancel(name)
        with self._changed:
            assert self._changed.wait_for(lambda: not self._unfinished, timeout=60)

    def first_token(self, adapter: Adapter | None) -> float:
        """Seconds from the submission of a short request to its first token."""
        start = time.perf_counter()
        name = self._submit(adapter, 1)
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._first, timeout=60)
        return self._first[name] - start

    def _submit(self, adapter: Adapter | None, max_tokens: int) -> str:
        name = str(self._number)
        self._number += 1
        self._unfinished.add(name)
        token = self._random.randrange(self.timed.spec.vocab_size)
        self.engine.submit(Request(name, (token,), max_tokens, adapter=adapter))
        return name

    def _add(self, deltas: list[Delta]) -> None:
        with self._changed:
            for delta in deltas:
                assert not delta.error, delta.error
                self._first.setdefault(delta.request_id, time.perf_counter())
                if delta.finish:
                    self._unfinished.discard(delta.request_id)
            self._changed.notify()


@dataclass
class Times:
    """Seconds of all measurements of one kind."""

    base_before: list[float] = field(default_factory=list)
    base_after: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # without a load in progress
    steps_beside_loads: list[float] = field(default_factory=list)
    first_base: list[float] = field(default_factory=list)
    first_resident: list[float] = field(default_factory=list)
    first_swap: list[float] = field(default_factory=list)


def tell(stage: str) -> None:
    print(f"{time.perf_counter() - BEGIN:.0f} s: {stage}", file=sys.stderr, flush=True)


def measure(load: Load, adapter: Adapter, slot_bytes: int, streams: int, swaps: int, device: str) -> Times:
    times = Times(copies=copy_seconds(slot_bytes, device))
    tell("steps of the base model")
    times.base_before = base_steps(load, streams, swaps)
    tell("first steps with adapters")
    names = [replace(adapter, name=f"adapter-{number}") for number in range(STREAM_ADAPTERS + SWAP_ADAPTERS)]
    used = names[: min(STREAM_ADAPTERS, streams)]
    for each in names:
        load.engine.register_adapter(each)
    for _ in range(2):  # captures the steps with adapters, and loads all adapters once
        running = load.streams(streams, used)
        for each in names[STREAM_ADAPTERS:]:
            load.first_token(each)
        load.stop(running)
    gc.collect()
    gc.freeze()  # as the worker does
    load.timed.loads.clear()
    for group in range(0, swaps, GROUP):
        tell(f"swaps from {group}")
        running = load.streams(streams, used)
        first = len(load.timed.ends)
        first_load = len(load.timed.loads)
        for number in range(group, min(group + GROUP, swaps)):
            swapped = names[STREAM_ADAPTERS + number % SWAP_ADAPTERS]
            for adapter_or_base, kind in (
                (None, times.first_base),
                (names[0], times.first_resident),
                (swapped, times.first_swap),
            ):
                time.sleep(random.random() * statistics.median(times.base_before))
                kind.append(load.first_token(adapter_or_base))
        loads = load.timed.loads[first_load:]
        for step in load.timed.steps(first):
            is_beside = any(step.overlaps(other) for other in loads)
            (times.steps_beside_loads if is_beside else times.steps).append(step.seconds)
        load.stop(running)
    times.loads = [interval.seconds for interval in load.timed.loads]
    assert len(times.loads) == swaps, f"{len(times.loads)} loads in {swaps} swaps"
    times.base_after = base_steps(load, streams, swaps)
    return times


def base_steps(load: Load, streams: int, count: int) -> list[float]:
    """Seconds of `count` steps of the base model."""
    for _ in range(2):  # the first turn warms up
        running = load.streams(streams, [None])
        first = len(load.timed.ends)
        while len(load.timed.ends) < first + count:
            time.sleep(0.001)
        load.stop(running)
    return [step.seconds for step in load.timed.steps(first)][:count]


def copy_seconds(size: int, device: str) -> list[float]:
    """Seconds of copies of `size` bytes from main memory to the device that do nothing else."""
    is_pinned = device == "cuda"
    source = torch.ones(size, dtype=torch.uint8, pin_memory=is_pinned)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(COPIES + 2):
        start = time.perf_counter()
        target.copy_(source, non_blocking=is_pinned)
        if is_pinned:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def rows(times: Times, label: str, slot_bytes: int, device: str) -> Iterator[Row]:
    """The rows of all measurements, in milliseconds."""

    def spread(name: str, seconds: Sequence[float], **more: object) -> Row:
        p99, slowest = (float(value) for value in np.percentile(seconds, (99, 100)))
        median = statistics.median(seconds)
        numbers = {"p99": round(1e3 * p99, 3), "max": round(1e3 * slowest, 3), "count": len(seconds), **more}
        return row(f"{label}, {name}", 1e3 * median, "ms", device=device, **numbers)

    copy = statistics.median(times.copies)
    step = statistics.median(times.steps)
    base_first = statistics.median(times.first_base)
    before = statistics.median(times.base_before)
    yield spread("plain copy of an adapter", times.copies, gigabytes_per_second=round(slot_bytes / copy / 1e9, 1))
    yield spread("load of an adapter", times.loads, of_copy=round(statistics.median(times.loads) / copy, 3))
    yield spread("step without a load", times.steps)
    over = sum(seconds > 1.3 * step for seconds in times.steps_beside_loads)
    slowest = max(times.steps_beside_loads) / step
    beside = {"above_1.3": over, "max_of_median": round(slowest, 3)}
    yield spread("step beside a load", times.steps_beside_loads, **beside)
    for name, seconds in (
        ("base model", times.first_base),
        ("adapter in a slot", times.first_resident),
        ("adapter that is loaded", times.first_swap),
    ):
        more_steps = round((statistics.median(seconds) - base_first) / step, 3)
        yield spread(f"first token, {name}", seconds, steps_more_than_base=more_steps)
    yield spread("base step before the first adapter", times.base_before)
    after = statistics.median(times.base_after)
    yield spread("base step after all loads", times.base_after, of_before=round(after / before, 4))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    arguments.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--streams", type=int, default=63, help="requests that decode all the time")
    arguments.add_argument("--swaps", type=int, default=200, help="adapters that are loaded meanwhile")
    arguments.add_argument("--save", default="adapter_swaps", help="name of the result file; empty: none")
    options = arguments.parse_args()
    backend = backends.load(options.backend)
    shape: Shape = SHAPES[options.shape]
    pages = (options.streams + 4) * (CONTEXT // 16 + 1)
    load_options = LoadOptions(
        context=CONTEXT,
        max_rows=options.streams + 1,
        page_size=16,
        cache_bytes=pages * page_bytes(16, shape.kv_heads, shape.head_dim, shape.layers, 4),
        adapter_slots=min(STREAM_ADAPTERS, options.streams) + SWAP_SLOTS,
        adapter_rank=options.rank,
    )
    tell("opening the model")
    with tempfile.TemporaryDirectory() as folder:
        files = stand_in(shape, Path(folder))
        load = Load(backend.open(files, load_options))
        adapter = write_adapter(shape, options.rank, Path(folder))
        spec = load.timed.spec
        slot_bytes = slot_values(files.config, options.rank) * DTYPES[spec.dtype].itemsize
        times = measure(load, adapter, slot_bytes, options.streams, options.swaps, options.backend)
        load.engine.close()
    device = backend.probe()
    name = device.name if isinstance(device, DeviceInfo) and options.backend != "cpu" else ""
    label = f"{shape.name}, LoRA rank {options.rank}, {options.streams} streams"
    save(options.save, rows(times, label, slot_bytes, name), part=True)


if __name__ == "__main__":
    main()
