"""What a device does between the steps: nothing, if all goes well."""

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
    """Shares of the time from the first piece of work to the last."""

    between: float  # around the copy of a step's numbers to the device, with which each begins
    within: float  # between kernels of one step


def traced(call: Callable[[], object]) -> list[Work]:
    """What the GPU did meanwhile, in order."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        call()
        torch.cuda.synchronize()
    found = (event for event in trace.events() or () if event.device_type == DeviceType.CUDA)
    return sorted(
        (Work(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in found),
        key=lambda work: work.start,
    )


def idle(trace: Iterable[Work]) -> Idle:
    """Of a trace in order of the starts; pieces may overlap."""
    works = list(trace)
    if len(works) < 2:
        return Idle(0.0, 0.0)
    between = within = 0.0
    end, last = works[0].stop, works[0]
    for work in works[1:]:
        gap = max(0.0, work.start - end)
        if _begins_step(work) or _begins_step(last):
            between += gap
        else:
            within += gap
        if work.stop >= end:
            end, last = work.stop, work
    span = end - works[0].start
    return Idle(between / span, within / span)


def _begins_step(work: Work) -> bool:
    return work.name.startswith("Memcpy HtoD")
