"""Captures graphs on CUDA devices. HIP devices also use this module: torch.cuda captures their graphs."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ....engine.batch import Ints
from ..device import Captured
from .recorder import GraphRecorder


class CudaRecorder(GraphRecorder):
    """See device.Recorder."""

    def __init__(self) -> None:
        super().__init__(torch.cuda)

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Captured:
        graph = self._graph
        self._graph = None
        graph.capture_end()

        def replay(contexts: Ints) -> None:
            graph.replay()  # its kernels read the contexts on the device

        return replay

    def weak(self, tensor: Tensor) -> Tensor:
        """See device.Recorder.weak."""
        internals = cast(Any, torch._C)
        size = tensor.untyped_storage().nbytes()
        storage = internals._construct_storage_from_data_pointer(
            tensor.untyped_storage().data_ptr(), tensor.device, size
        )
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
