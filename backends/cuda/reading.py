"""The roof over decoding: how fast the GPU reads its memory."""

from __future__ import annotations

import torch

from ...kernels.benchmark import device_ceilings

SIZE = 2**30  # bytes: far more than caches hold, and free beside a model


def read_bandwidth() -> float | None:
    """Bytes per second; None where too little memory is free to find out."""
    try:
        return device_ceilings.read_bandwidth(SIZE)
    except torch.OutOfMemoryError:
        return None
