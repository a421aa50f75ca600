"""Host time of one decode step, without and with the runner of the torch devices.

The engine plans the step, builds the batch and commits the tokens. The runner packs the batch, starts a captured step
and reads the drawn tokens; its model computes nothing. The launch of kernels on a GPU is not included.
`python scripts/bench/host_step.py [STEPS]`: `ours` is the median, `target` the limit for a number of rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from rows import Row, parser, row, save

from localllm.backends.pytorch.device import Captured, Device
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.inputs import Step
from localllm.backends.pytorch.kv import GroupedKV, PagedKV
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.engine import Engine
from localllm.engine.kv import KVCache
from localllm.engine.lora import AdapterPool
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import CacheGroup, RunnerSpec, StepResult
from localllm.engine.scheduler import Scheduler
from localllm.kernels.ops import Ops

VOCAB = 32_000
TARGETS = {8: 100.0, 64: 600.0}  # rows: microseconds of the engine
RUNNER_TARGETS = {1: 100.0, 64: 500.0, 256: 1200.0}  # rows: microseconds of engine and runner


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    context: int  # tokens of each prompt
    sampling: Sampling = Sampling()
    overlap: bool = True


PLAIN = [Case("greedy", rows, context) for rows in TARGETS for context in (256, 4096)]
CASES = [
    *PLAIN,
    *(replace(case, name="greedy without overlap", overlap=False) for case in PLAIN if case.context == 256),
    *(Case("penalties", rows, 256, Sampling(frequency_penalty=0.5), overlap=False) for rows in TARGETS),
    *(Case("sampled", rows, 256, Sampling(temperature=0.8, top_p=0.9)) for rows in TARGETS),
]


def microseconds(case: Case, steps: int) -> list[float]:
    """Host time of each step while all rows decode."""
    length = case.context + steps + 1
    spec = RunnerSpec(
        vocab_size=VOCAB,
        max_tokens=case.rows * case.context,
        max_rows=case.rows,
        max_context=length,
        groups=(CacheGroup(16, case.rows * (length // 16 + 1)),),
    )
    scheduler = Scheduler(spec, KVCache(spec), AdapterPool(0, 0, lambda slot, adapter: None))
    random = np.random.default_rng(0)
    for number in range(case.rows):
        prompt = tuple(random.integers(0, VOCAB, case.context).tolist())
        scheduler.add(Request(str(number), prompt, steps + 1, case.sampling))
    starts = np.arange(case.rows + 1, dtype=np.int32)
    answers = [StepResult(random.integers(0, VOCAB, case.rows, dtype=np.int32), starts) for _ in range(steps)]
    scheduler.schedule()  # all prompts in one step
    if not case.overlap:
        scheduler.commit(answers[0])
    times = []
    for answer in answers:
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduler.commit(answer)
        times.append(1e6 * (time.perf_counter() - start))
        assert batch is not None
        assert batch.num_tokens == case.rows
    return times


class EmptyModel:
    """A model that computes nothing."""

    def __call__(self, step: Step, ops: Ops, kv: GroupedKV) -> torch.Tensor:
        return torch.zeros(len(step.last), 1)

    def logits(self, hidden: torch.Tensor, ops: Ops, adapters: object = None) -> torch.Tensor:
        return torch.zeros(len(hidden), 8)


class EmptyRecorder:
    """A device.Recorder that captures nothing and replays nothing."""

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None:
        pass

    def end(self) -> Captured:
        return lambda contexts: None

    def call(
        self, function: Callable[..., tuple[torch.Tensor, ...]], *arguments: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return function(*arguments)

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def runner_microseconds(rows: int, context: int, sampling: Sampling, steps: int) -> list[float]:
    """Host time of each step of engine and runner."""
    length = context + steps + rows + 16
    spec = RunnerSpec(
        vocab_size=8,
        max_tokens=rows * context,
        max_rows=rows,
        max_context=length,
        groups=(CacheGroup(16, rows * (length // 16 + 1)),),
        overlap=True,
        graph_rows=(rows,),
    )
    device = Device("cpu", "cpu", torch.cpu, Ops(), torch.float32, overlap=True, recorder=EmptyRecorder)
    pages = PagedKV(1, spec.groups[0].num_pages, spec.groups[0].page_size, 1, (1, 1), torch.float32, "cpu")
    kv = GroupedKV([pages], [0], layer_stacks=[0], layer_groups=[0])
    engine = Engine(GraphRunner(TorchRunner(EmptyModel(), kv, spec, device), EmptyRecorder()))
    random = np.random.default_rng(0)
    for number in range(rows):  # lengths differ, so that not all rows need a page in the same step
        prompt = tuple(random.integers(0, 8, context - number % 16).tolist())
        engine.submit(Request(str(number), prompt, steps + 16, sampling))
    for _ in range(8):
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def measure(steps: int) -> Iterator[Row]:
    torch.set_num_threads(1)
    for case in CASES:
        times = sorted(microseconds(case, steps))
        name = f"host step, {case.name}, {case.rows} rows, {case.context} tokens each"
        p90 = round(times[int(len(times) * 0.9)], 1)
        yield row(name, statistics.median(times), "µs", p90=p90, target=TARGETS[case.rows])
    for rows, target in RUNNER_TARGETS.items():
        for label, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=0.8, top_p=0.9))):
            times = sorted(runner_microseconds(rows, 512, sampling, steps))
            name = f"host step with the runner, {label}, {rows} row{'s' * (rows > 1)}"
            p90 = round(times[int(len(times) * 0.9)], 1)
            yield row(name, statistics.median(times), "µs", p90=p90, target=target)


if __name__ == "__main__":
    arguments = parser(__doc__, "host_step")
    arguments.add_argument("steps", type=int, nargs="?", default=1000)
    options = arguments.parse_args()
    save(options.save, measure(options.steps))
