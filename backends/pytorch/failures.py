"""Translates errors of torch and its devices to the engine's errors. No other file translates them.

The context managers here are classes, not generators. Since Python 3.12 an error that passes through a generator of
contextlib is in a reference cycle with its frames. The memory of a failed step or load would then stay allocated until
Python's garbage collector runs.
"""

from __future__ import annotations

from types import TracebackType

import torch

from ...engine.errors import ModelTooLarge, OutOfMemory, RunnerFailed

# Errors that torch raises when a kernel, an index or an allocation fails.
_FAILURES = (RuntimeError, IndexError, ValueError, MemoryError)

# Words in the out-of-memory errors of CUDA, HIP, their libraries, Level Zero and the CPU that torch raises as
# RuntimeError.
_SHORTAGES = (
    "out of memory",
    "ALLOC_FAILED",
    "hipErrorOutOfMemory",
    "rocblas_status_memory_error",
    "OUT_OF_DEVICE_MEMORY",
    "can't allocate memory",
)


class failures:
    """A context that translates an error of torch to OutOfMemory or RunnerFailed. Its message begins with `prefix`.

    A device may report the failure of a step during a later step.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, _FAILURES):
            translation = OutOfMemory if is_shortage(error) else RunnerFailed
            raise translation(f"{self._prefix}: {_brief(error)}") from error


class load_failures:
    """A context that translates an out-of-memory error to ModelTooLarge, and the failure of a device to RunnerFailed.
    It does not translate other errors, which may be bugs."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, (OutOfMemory, *_FAILURES)):
            return
        if isinstance(error, OutOfMemory) or is_shortage(error):
            raise ModelTooLarge(
                f"{self._model} does not fit into the device memory: {_brief(error)}",
                "close other programs, use a smaller cache, or choose a smaller model",
            ) from error
        if isinstance(error, torch.AcceleratorError):
            raise RunnerFailed(f"the device failed while loading {self._model}: {_brief(error)}") from error


def is_shortage(error: Exception) -> bool:
    """Whether the error means out of memory, on the device or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(word in str(error) for word in _SHORTAGES)


def _brief(error: Exception) -> str:
    """The first two sentences of the message. The sentences after them are torch's advice for programmers."""
    line = str(error).partition("\n")[0]
    return ". ".join(line.split(". ")[:2]).rstrip(".") or type(error).__name__
