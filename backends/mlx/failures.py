"""What MLX reports of a step, in the engine's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...engine.errors import OutOfMemory, RunnerFailed

# Words of MLX's errors where memory ran out: its allocators', Metal's, CUDA's.
_SHORTAGES = ("Unable to allocate", "Attempting to allocate", "Insufficient Memory", "out of memory")


@contextmanager
def failures() -> Iterator[None]:
    """Whatever fails within, sometimes only of an earlier step, becomes RunnerFailed."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, MemoryError) as error:
        raise RunnerFailed(f"the step failed: {error}") from error


@contextmanager
def shortages() -> Iterator[None]:
    """Around what MLX allocates for: too little memory becomes OutOfMemory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(word in str(error) for word in _SHORTAGES):
            raise OutOfMemory(f"too little memory for the step: {error}") from error
        raise
