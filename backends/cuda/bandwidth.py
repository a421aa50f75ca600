"""Measures the read bandwidth of the GPU memory, which bounds the speed of decode."""

from __future__ import annotations

import torch

from ...kernels.benchmark import gpu_peaks

SIZE = 2**30  # bytes: much larger than the caches, and small enough to fit in memory with a loaded model


def read_bandwidth() -> float | None:
    """Bytes per second, or None if SIZE bytes of GPU memory are not free."""
    try:
        return gpu_peaks.read_bandwidth(SIZE)
    except torch.OutOfMemoryError:
        return None
