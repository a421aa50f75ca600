"""Measures the memory read bandwidth of MLX's device."""

from __future__ import annotations

import statistics
import time

import mlx.core as mx

BYTES = 2**29  # far more than any cache
REPEATS = 5


def read_bandwidth() -> float:
    """Bytes per second of the sum of an array, the median of a few repeats."""
    data = mx.random.normal((BYTES // 4,))
    mx.eval(data)
    seconds = []
    for _ in range(REPEATS + 1):  # the first one compiles
        began = time.perf_counter()
        mx.eval(mx.sum(data))
        seconds.append(time.perf_counter() - began)
    return BYTES / statistics.median(seconds[1:])
