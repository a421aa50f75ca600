"""Recording on CUDA devices, and on those whose torch module has the same graphs (HIP)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """All recorders' of a device: libraries keep a workspace for each stream that they have ever seen."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """See device.Recorder. One pool of memory for all recordings."""

    def __init__(self) -> None:
        self._stream = _stream(torch.cuda.current_device())
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        torch.cuda.synchronize()
        collects = gc.isenabled()
        gc.disable()  # a tensor that is freed in between would free its memory outside of the recording
        try:
            with torch.cuda.stream(self._stream):
                try:
                    yield
                except BaseException:
                    self._throw_away()
                    raise
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _throw_away(self) -> None:
        """What was recorded in a session that failed; torch allows no pool whose recordings are all gone again."""
        if self._graph is not None:
            with suppress(RuntimeError):
                self.end()  # on the stream that it began on
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError):
            torch.cuda.synchronize()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        assert self._graph is not None
        graph = self._graph
        self._graph = None
        graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def call(self, function: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
        return function(*given)

    def weak(self, tensor: Tensor) -> Tensor:
        """The same memory, without keeping it from what is recorded later."""
        internals = cast(Any, torch._C)
        size = tensor.untyped_storage().nbytes()
        storage = internals._construct_storage_from_data_pointer(
            tensor.untyped_storage().data_ptr(), tensor.device, size
        )
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
