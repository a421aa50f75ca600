"""What one decode step costs the engine itself: planning, building the batch, taking in the tokens. No backend.

`python scripts/bench/host_step.py [STEPS]`; `ours` is the median, `target` 100 µs at 8 rows and 600 µs at 64.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from rows import Row, row, save

from localllm.engine.kv import make_cache
from localllm.engine.lora import AdapterPool
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import RunnerSpec, StepResult
from localllm.engine.scheduler import Scheduler

VOCAB = 32_000
TARGETS = {8: 100.0, 64: 600.0}  # rows: microseconds


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
        cache="pages",
        num_pages=case.rows * (length // 16 + 1),
    )
    scheduler = Scheduler(spec, make_cache(spec), AdapterPool(0, 0, lambda slot, adapter: None))
    random = np.random.default_rng(0)
    for number in range(case.rows):
        prompt = tuple(random.integers(0, VOCAB, case.context).tolist())
        scheduler.add(Request(str(number), prompt, steps + 1, case.sampling))
    answers = [StepResult(random.integers(0, VOCAB, case.rows, dtype=np.int32)) for _ in range(steps)]
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


def measure(steps: int) -> Iterator[Row]:
    for case in CASES:
        times = sorted(microseconds(case, steps))
        name = f"host step, {case.name}, {case.rows} rows, {case.context} tokens each"
        p90 = round(times[int(len(times) * 0.9)], 1)
        yield row(name, statistics.median(times), "µs", p90=p90, target=TARGETS[case.rows])


if __name__ == "__main__":
    save("host_step", measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
