"""Captures graphs on CUDA devices. HIP devices also use this module: torch.cuda captures their graphs."""

from __future__ import annotations

import torch

from .recorder import GraphRecorder


class CudaRecorder(GraphRecorder):
    """See device.Recorder."""

    def __init__(self) -> None:
        super().__init__(torch.cuda)

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
