"""Errors of torch and its devices, translated to the engine's errors. No other file translates them.

The context managers are classes, not generators: since Python 3.12 an error that passes through a generator of
contextlib is in a reference cycle with its frames, and the memory of a failed step or load stays allocated until
Python's collector runs.
"""

from __future__ import annotations

from types import TracebackType

import torch

from ...engine.errors import ModelRefused, OutOfMemory, RunnerFailed

# Errors that torch raises when a kernel, an index or an allocation fails.
_FAILURES = (RuntimeError, IndexError, ValueError, MemoryError)

# Words in out-of-memory errors of CUDA, its libraries and the CPU, which torch raises as plain RuntimeError.
_SHORTAGES = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


class failures:
    """Translates an error in the block to OutOfMemory or RunnerFailed. The message begins with `what`.

    A device may report the failure of a step at a later step. After a broken context every call fails.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, _FAILURES):
            raise (OutOfMemory if is_shortage(error) else RunnerFailed)(f"{self._what}: {_brief(error)}") from error


class load_failures:
    """Translates out of memory to ModelRefused, a broken device to RunnerFailed. Other errors may be bugs and pass."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, OutOfMemory) or (isinstance(error, _FAILURES) and is_shortage(error)):
            raise ModelRefused(
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
    """The message without torch's advice to programmers."""
    line = str(error).partition("\n")[0]
    return ". ".join(line.split(". ")[:2]).rstrip(".") or type(error).__name__
