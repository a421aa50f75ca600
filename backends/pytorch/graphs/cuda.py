"""Recording on CUDA devices, and on those whose torch module has the same graphs (HIP)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

Made = TypeVar("Made")


class CudaRecorder:
    """See device.Recorder. One pool of memory for all recordings, one stream to record on."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # what compiles, loads or allocates at its first call must not do so while recording
            self._stream.synchronize()
            collects = gc.isenabled()
            gc.disable()  # a tensor that is freed in between would free its memory outside of the recording
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    made = work()
                finally:
                    graph.capture_end()
            finally:
                if collects:
                    gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs.append(graph)
        return made, graph.replay
