"""The common part of the graph recorders of torch's devices: capture stream, memory pool, end of a failed capture."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from ....engine.batch import Ints
from ..device import Captured


@cache
def capture_stream(module: ModuleType, device: int) -> Any:
    """The capture stream of a device. There is only one, because libraries and kernels allocate memory for every stream
    that they run on. Replays of all recorders of a device are therefore serial; streams.py has parallel work."""
    return module.Stream(device)


class GraphRecorder:
    """See device.Recorder. All captures share one memory pool. A subclass begins a capture."""

    def __init__(self, module: ModuleType) -> None:
        """`module`: torch.cuda (also for HIP), torch.npu or torch.xpu."""
        self._module = module
        self._stream = capture_stream(module, module.current_device())
        self._pool = module.graph_pool_handle()
        self._graph: Any = None

    @contextmanager
    def session(self) -> Iterator[None]:
        self._wait()
        was_enabled = gc.isenabled()
        gc.disable()  # a tensor that is collected during a capture would free its memory outside of the capture
        try:
            with self._module.stream(self._stream):
                try:
                    yield
                except BaseException:
                    self._discard()
                    raise
        finally:
            if was_enabled:
                gc.enable()
        self._module.current_stream().wait_stream(self._stream)

    def _discard(self) -> None:
        """Discard the captures of a failed session. torch cannot reuse a memory pool without captures."""
        if self._graph is not None:
            with suppress(RuntimeError):
                self.end()  # a capture must end on the stream where it began
        self._pool = self._module.graph_pool_handle()
        with suppress(RuntimeError):
            self._wait()

    def _wait(self) -> None:
        """Wait for the work of the device."""
        self._module.synchronize()

    def begin(self) -> None:
        raise NotImplementedError

    def end(self) -> Captured:
        """See device.Recorder.end. The kernels of a replay read the contexts on the device."""
        graph = self._graph
        self._graph = None
        graph.capture_end()

        def replay(contexts: Ints) -> None:
            graph.replay()

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
