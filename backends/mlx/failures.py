"""Errors of MLX as errors of the engine.

Classes, not generators: from Python 3.12 on, contextlib's generators put an error into a cycle with its frames, which
would keep the arrays of a failed step until Python's next garbage collection.
"""

from __future__ import annotations

from types import TracebackType

from ...engine.errors import OutOfMemory, RunnerFailed

# Parts of the messages of MLX's allocators, of Metal and of CUDA.
_OUT_OF_MEMORY = ("Unable to allocate", "Attempting to allocate", "Insufficient Memory", "out of memory")


class failures:
    """Turns an error of a step, or of an earlier one, into RunnerFailed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, RuntimeError | ValueError | IndexError | TypeError | AttributeError | MemoryError):
            raise RunnerFailed(f"the step failed: {error}") from error


class shortages:
    """Turns an error of allocation into OutOfMemory."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        shortage = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
        if shortage or isinstance(error, MemoryError):
            raise OutOfMemory(f"not enough memory for the step: {error}") from error
