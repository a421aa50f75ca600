"""Captures graphs on CUDA devices. HIP devices use this module too: torch.cuda captures their graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ....engine.batch import Ints
from ..device import Captured


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The capture stream of a device. There is only one, because libraries and kernels allocate memory for every stream
    that they run on. Replays of all recorders of a device are therefore serial; streams.py has parallel work."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """See device.Recorder. All captures share one memory pool."""

    def __init__(self) -> None:
        self._stream = _stream(torch.cuda.current_device())
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        torch.cuda.synchronize()
        was_enabled = gc.isenabled()
        gc.disable()  # a tensor that is collected during a capture would free its memory outside of the capture
        try:
            with torch.cuda.stream(self._stream):
                try:
                    yield
                except BaseException:
                    self._discard()
                    raise
        finally:
            if was_enabled:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _discard(self) -> None:
        """Discard the captures of a failed session. torch cannot reuse a memory pool without captures."""
        if self._graph is not None:
            with suppress(RuntimeError):
                self.end()  # a capture must end on the stream where it began
        self._pool = torch.cuda.graph_pool_handle()
        with suppress(RuntimeError):
            torch.cuda.synchronize()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Captured:
        assert self._graph is not None
        graph = self._graph
        self._graph = None
        graph.capture_end()

        def replay(contexts: Ints) -> None:
            graph.replay()  # its kernels read the contexts on the device

        return replay

    def call(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs)

    def weak(self, tensor: Tensor) -> Tensor:
        """See device.Recorder.weak."""
        internals = cast(Any, torch._C)
        size = tensor.untyped_storage().nbytes()
        storage = internals._construct_storage_from_data_pointer(
            tensor.untyped_storage().data_ptr(), tensor.device, size
        )
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
