"""Errors of MLX become errors of the engine."""

from __future__ import annotations

import gc
import weakref

import pytest

from localllm.backends.mlx.failures import engine_errors
from localllm.engine.errors import EngineError, OutOfMemory, RunnerFailed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[metal::malloc] Attempting to allocate 100 bytes"), OutOfMemory),
        (RuntimeError("[malloc] Unable to allocate 100 bytes."), OutOfMemory),
        (RuntimeError("Command buffer execution failed: Insufficient Memory"), OutOfMemory),
        (RuntimeError("cudaMallocAsync failed: out of memory"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (RuntimeError("no such kernel"), RunnerFailed),
        (ValueError("out of memory"), RunnerFailed),
        (IndexError("of a row"), RunnerFailed),
        (TypeError("of an argument"), RunnerFailed),
        (AttributeError("of a model"), RunnerFailed),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_error_of_mlx_becomes_an_error_of_the_engine(error: Exception, kind: type[EngineError]) -> None:
    with pytest.raises(kind) as raised, engine_errors():
        raise error
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyError("out of memory"), OutOfMemory("lost pages"), RunnerFailed("ended")])
def test_other_error_stays(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, engine_errors():
        raise error
    assert raised.value is error


class Array:
    """Stands for an array of a failed step."""


def test_converted_error_is_in_no_cycle() -> None:
    """Else the arrays of a failed step would stay until the next garbage collection."""

    def fail() -> weakref.ref[Array]:
        array = Array()
        reference = weakref.ref(array)
        try:
            with engine_errors():
                raise RuntimeError("out of memory")
        except OutOfMemory:
            return reference

    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()
