"""The idle time of a device between steps, from a trace of the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class Work(NamedTuple):
    """A kernel or a copy, times in seconds on one clock."""

    name: str
    start: float
    stop: float


class Idle(NamedTuple):
    """Shares of the time from the first kernel or copy to the last."""

    between: float  # before and after the copy of the inputs to the device, with which each step begins
    within: float  # between kernels of one step


def traced(call: Callable[[], object]) -> list[Work]:
    """The kernels and copies of the GPU during the call, in order of their starts."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        call()
        torch.cuda.synchronize()
    works: list[Work] = []
    for event in trace.events() or ():
        if event.device_type == DeviceType.CUDA:
            works.append(Work(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6))
    return sorted(works, key=lambda work: work.start)


def idle(trace: Iterable[Work]) -> Idle:
    """The idle shares of a trace, which is in order of the starts. Kernels and copies may overlap."""
    works = list(trace)
    if len(works) < 2:
        return Idle(0.0, 0.0)
    between = 0.0
    within = 0.0
    last = works[0]  # the work that ends last
    for work in works[1:]:
        gap = max(0.0, work.start - last.stop)
        if _begins_step(work) or _begins_step(last):
            between += gap
        else:
            within += gap
        if work.stop >= last.stop:
            last = work
    span = last.stop - works[0].start
    return Idle(between / span, within / span)


def _begins_step(work: Work) -> bool:
    return work.name.startswith("Memcpy HtoD")
