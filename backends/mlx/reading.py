"""How fast MLX's device reads its memory."""

from __future__ import annotations

import statistics
import time

import mlx.core as mx

BYTES = 2**29  # far beyond any cache
TURNS = 5


def read_bandwidth() -> float:
    """Bytes per second of summing an array, the median of a few turns."""
    data = mx.random.normal((BYTES // 4,))
    mx.eval(data)
    seconds = []
    for _ in range(TURNS + 1):  # the first compiles
        began = time.perf_counter()
        mx.eval(mx.sum(data))
        seconds.append(time.perf_counter() - began)
    return BYTES / statistics.median(seconds[1:])
