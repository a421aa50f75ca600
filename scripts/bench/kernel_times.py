"""The time of each kernel in a decode step, from a trace of the profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from idle import Work, idle

MAX_KERNELS = 30
MAX_NAME = 90
NOISE = re.compile(r"^void |\(anonymous namespace\)::|localllm::|at::native::|<unnamed>::")


class KernelTime(NamedTuple):
    """The time of all kernels of one name in a step. A kernel may begin before the previous one ends; only the time
    from that end to its own end counts, so the times of all kernels add up to `busy`."""

    milliseconds: float
    launches: float


class StepTime(NamedTuple):
    """Milliseconds of one step: kernels and copies, and gaps in which the device is idle."""

    busy: float
    gaps: float
    kernels: Mapping[str, KernelTime]  # the slowest, in order


def step_time(trace: Iterable[Work], steps: int) -> StepTime:
    """The means over a trace of `steps` steps, which is in order of the starts."""
    works = list(trace)
    seconds: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, int] = defaultdict(int)
    end = 0.0  # of the work until now
    for work in works:
        name = NOISE.sub("", work.name)[:MAX_NAME]
        seconds[name] += max(0.0, work.stop - max(work.start, end))
        launches[name] += 1
        end = max(end, work.stop)
    slowest = sorted(seconds, key=lambda name: seconds[name], reverse=True)[:MAX_KERNELS]
    kernels = {name: KernelTime(round(1e3 * seconds[name] / steps, 4), launches[name] / steps) for name in slowest}
    shares = idle(works)
    span = 1e3 * (max(work.stop for work in works) - works[0].start) / steps
    gaps = span * (shares.between + shares.within)
    return StepTime(span - gaps, gaps, kernels)
