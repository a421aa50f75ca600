"""What torch and its devices report, in the engine's words: the only place where one becomes the other.

Classes, not generators: from Python 3.12 on an error that passes through contextlib's is in a cycle with the frames
it came through, and what a failed step or load took would stay in memory until Python's collector comes.
"""

from __future__ import annotations

from types import TracebackType

import torch

from ...engine.errors import ModelRefused, OutOfMemory, RunnerFailed

# What torch raises when a kernel, an index or an allocation fails.
_FAILURES = (RuntimeError, IndexError, ValueError, MemoryError)

# Words of errors that mean the same as torch.OutOfMemoryError: CUDA's own, those of its libraries, the CPU's.
_SHORTAGES = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


class failures:
    """Whatever fails within becomes OutOfMemory or RunnerFailed, whose texts begin with `what`.

    A device may report a step's failure only at a later one, and what broke its context fails every call from then on.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, _FAILURES):
            raise (OutOfMemory if is_shortage(error) else RunnerFailed)(f"{self._what}: {_brief(error)}") from error


class load_failures:
    """Too little memory for a model becomes ModelRefused, a device that breaks RunnerFailed. Others may be bugs."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, OutOfMemory) or (isinstance(error, _FAILURES) and is_shortage(error)):
            raise ModelRefused(
                f"{self._model} does not fit into the device's memory: {_brief(error)}",
                "close other programs, allow a smaller cache, or choose a smaller model",
            ) from error
        if isinstance(error, torch.AcceleratorError):
            raise RunnerFailed(f"the device failed while {self._model} was loaded: {_brief(error)}") from error


def is_shortage(error: Exception) -> bool:
    """It says that memory ran out, on the device or off it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(word in str(error) for word in _SHORTAGES)


def _brief(error: Exception) -> str:
    """What happened, without the advice to programmers that torch adds."""
    line = str(error).partition("\n")[0]
    return ". ".join(line.split(". ")[:2]).rstrip(".") or type(error).__name__
