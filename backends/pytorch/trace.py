"""A trace of the ops: which implementation computed which shapes. Python's profiler hook sees the calls of this thread.

Nothing is wrapped, so ops cost nothing more when no trace runs. A wrapper that calls the implementation of another set,
for a shape that it does not support, is shown with both: "triton > reference".
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from .device import Device

SHOWN = 3  # tensors of a call


class Call(NamedTuple):
    """Equal calls of an op."""

    op: str
    implementation: str  # the name of its set, and of those that it called for the same op
    inputs: str  # shapes and dtypes of the first tensors
    output: str


@dataclass(slots=True)
class _Running:
    frame: FrameType
    op: str
    sets: list[str]
    inputs: str


@dataclass(slots=True)
class _Hook:
    """The profiler hook. `known`: the code of each implementation, with its op and its set."""

    known: Mapping[CodeType, tuple[str, str]]
    calls: Counter[Call] = field(default_factory=Counter)
    running: list[_Running] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        if event == "call" and frame.f_code in self.known:
            op, name = self.known[frame.f_code]
            self.running.append(_Running(frame, op, [name], _shapes(frame.f_locals.values())))
        elif event == "return" and self.running and self.running[-1].frame is frame:
            self._end(self.running.pop(), result)

    def _end(self, ended: _Running, result: Any) -> None:
        caller = self.running[-1] if self.running else None
        if caller is not None and caller.op == ended.op:
            caller.sets += [name for name in ended.sets if name not in caller.sets]
            return
        output = _shapes(result if isinstance(result, tuple) else [result])
        self.calls[Call(ended.op, " > ".join(ended.sets), ended.inputs, output)] += 1


@contextmanager
def traced(device: Device) -> Iterator[Counter[Call]]:
    """Counts the calls of the device's ops in the block, in this thread, in the order of their first end."""
    known: dict[CodeType, tuple[str, str]] = {}
    for one in device.kernels:
        known = {function.__code__: (op, one.name) for op, function in one.ops if one.serves(op)} | known
    others = {function.__code__: (op, device.ops.title(op)) for op, function in device.ops}  # e.g. FlashInfer's
    hook = _Hook(others | known)
    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield hook.calls
    finally:
        sys.setprofile(before)


def _shapes(values: Iterable[Any]) -> str:
    """The first tensors, e.g. "8x64 bfloat16, 64 float32"."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return ", ".join(
        f"{'x'.join(map(str, x.shape)) or '1'} {str(x.dtype).removeprefix('torch.')}" for x in tensors[:SHOWN]
    )
