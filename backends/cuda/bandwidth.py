"""Measures the memory read bandwidth of the GPU, the roofline of decode."""

from __future__ import annotations

import torch

from ...kernels.benchmark import gpu_peaks

SIZE = 2**30  # bytes: far larger than the caches, small enough to fit beside a model


def read_bandwidth() -> float | None:
    """Bytes per second; None if SIZE bytes of memory are not free."""
    try:
        return gpu_peaks.read_bandwidth(SIZE)
    except torch.OutOfMemoryError:
        return None
