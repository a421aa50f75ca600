"""What MLX reports of a step, in the engine's words.

Classes, not generators: from Python 3.12 on an error that passes through contextlib's is in a cycle with the frames
it came through, and what the failed step computed would stay in memory until Python's collector comes.
"""

from __future__ import annotations

from types import TracebackType

from ...engine.errors import OutOfMemory, RunnerFailed

# Words of MLX's errors where memory ran out: its allocators', Metal's, CUDA's.
_SHORTAGES = ("Unable to allocate", "Attempting to allocate", "Insufficient Memory", "out of memory")


class failures:
    """Whatever fails within, sometimes only of an earlier step, becomes RunnerFailed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, RuntimeError | ValueError | IndexError | TypeError | AttributeError | MemoryError):
            raise RunnerFailed(f"the step failed: {error}") from error


class shortages:
    """Around what MLX allocates for: too little memory becomes OutOfMemory."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        short = isinstance(error, RuntimeError) and any(word in str(error) for word in _SHORTAGES)
        if short or isinstance(error, MemoryError):
            raise OutOfMemory(f"too little memory for the step: {error}") from error
