"""Captures graphs on Intel GPUs. docs/hardware.md says why they are off by default."""

from __future__ import annotations

import torch

from ..pytorch.graphs.recorder import GraphRecorder


class XpuRecorder(GraphRecorder):
    """See device.Recorder. It calls XPUGraph without the context `torch.xpu.graph`, which waits for the device."""

    def __init__(self) -> None:
        super().__init__(torch.xpu)

    def _wait(self) -> None:
        """Waits for the stream only: torch 2.13 crashes if a process waits for a device after a replay."""
        torch.xpu.current_stream().synchronize()

    def begin(self) -> None:
        self._graph = torch.xpu.XPUGraph()
        self._graph.capture_begin(pool=self._pool)
