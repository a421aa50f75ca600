"""What torch and its devices report, in the engine's words: the only place where one becomes the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...engine.errors import ModelRefused, OutOfMemory, RunnerFailed

# What torch raises when a kernel, an index or an allocation fails.
_FAILURES = (RuntimeError, IndexError, ValueError, MemoryError)

# Words of errors that mean the same as torch.OutOfMemoryError: CUDA's own, those of its libraries, the CPU's.
_SHORTAGES = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Whatever fails within becomes OutOfMemory or RunnerFailed, whose texts begin with `what`.

    A device may report a step's failure only at a later one, and what broke its context fails every call from then on.
    """
    try:
        yield
    except _FAILURES as error:
        raise (OutOfMemory if is_shortage(error) else RunnerFailed)(f"{what}: {_brief(error)}") from error


@contextmanager
def load_failures(model: str) -> Iterator[None]:
    """Too little memory for a model becomes ModelRefused, a device that breaks RunnerFailed. Others may be bugs."""
    try:
        yield
    except (OutOfMemory, *_FAILURES) as error:
        if isinstance(error, OutOfMemory) or is_shortage(error):
            raise ModelRefused(
                f"{model} does not fit into the device's memory: {_brief(error)}",
                "close other programs, allow a smaller cache, or choose a smaller model",
            ) from error
        if isinstance(error, torch.AcceleratorError):
            raise RunnerFailed(f"the device failed while {model} was loaded: {_brief(error)}") from error
        raise


def is_shortage(error: Exception) -> bool:
    """It says that memory ran out, on the device or off it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(word in str(error) for word in _SHORTAGES)


def _brief(error: Exception) -> str:
    """What happened, without the advice to programmers that torch adds."""
    line = str(error).partition("\n")[0]
    return ". ".join(line.split(". ")[:2]).rstrip(".") or type(error).__name__
