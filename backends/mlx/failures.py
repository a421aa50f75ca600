"""Errors of MLX as errors of the engine."""

from __future__ import annotations

import re
from types import TracebackType

from ...engine.errors import OutOfMemory, RunnerFailed

# Messages of MLX's allocators, of Metal and of CUDA.
_OUT_OF_MEMORY = re.compile("Unable to allocate|Attempting to allocate|Insufficient Memory|out of memory")


class engine_errors:
    """A context that converts the errors of a step: a failed allocation becomes OutOfMemory, any other error
    RunnerFailed.

    This is a class, not a generator: from Python 3.12 on, contextlib's generators put an error into a cycle with its
    frames, which would keep the arrays of a failed step until Python's next garbage collection.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        out_of_memory = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))
        if out_of_memory or isinstance(error, MemoryError):
            raise OutOfMemory(f"not enough memory for the step: {error}") from error
        if isinstance(error, RuntimeError | ValueError | IndexError | TypeError | AttributeError):
            raise RunnerFailed(f"the step failed: {error}") from error
