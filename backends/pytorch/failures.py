"""What torch and its devices report, in the engine's words: the only place where one becomes the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...engine.errors import OutOfMemory, RunnerFailed

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
        text = _brief(error)
        short = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in text for word in _SHORTAGES)
        raise (OutOfMemory if short else RunnerFailed)(f"{what}: {text}") from error


def _brief(error: Exception) -> str:
    """What happened, without the advice to programmers that torch adds."""
    line = str(error).partition("\n")[0]
    return ". ".join(line.split(". ")[:2]).rstrip(".") or type(error).__name__
