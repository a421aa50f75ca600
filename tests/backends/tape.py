"""Graph capture on the CPU: a dispatch mode records every op of torch, and a replay calls the ops again.

The CPU gains no speed from it. The tests use it to run the code that captures and replays steps on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localllm.backends.pytorch.device import Captured
from localllm.engine.batch import Ints


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


class Tape:
    """A recorder (backends/pytorch/device.py) for the CPU."""

    def __init__(self) -> None:
        self._notes: _Notes | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._notes is not None:
                self.end()

    def begin(self) -> None:
        self._notes = _Notes()
        self._notes.__enter__()

    def end(self) -> Captured:
        assert self._notes is not None
        notes, self._notes = self._notes, None
        notes.__exit__(None, None, None)

        def replay(contexts: Ints) -> None:
            for func, args, kwargs, result in notes.calls:
                _put(func(*self.updated(func, args, contexts), **kwargs), result)

        return replay

    def call(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Record the call as one entry: compiled code dispatches no torch ops."""
        notes = self._notes
        if notes is None:
            return function(*inputs)
        notes.__exit__(None, None, None)
        try:
            result = function(*inputs)
        finally:
            notes.__enter__()  # the session's end leaves it
        notes.calls.append((function, inputs, {}, result))
        return result

    def updated(self, func: Callable[..., Any], args: tuple[Any, ...], contexts: Ints) -> tuple[Any, ...]:
        """The arguments of a captured call in a replay."""
        return args

    def weak(self, tensor: Tensor) -> Tensor:
        return tensor


def _put(copy: Any, result: Any) -> None:
    """Copy the results of a replay to the memory of the captured results, unless they share it (views)."""
    if isinstance(result, Tensor):
        if copy.untyped_storage().data_ptr() != result.untyped_storage().data_ptr():
            with torch.inference_mode():
                result.copy_(copy)
    elif isinstance(result, (tuple, list)):
        for one, other in zip(copy, result, strict=True):
            _put(one, other)
