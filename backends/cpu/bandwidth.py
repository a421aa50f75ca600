"""Measures the read bandwidth of main memory, which bounds the speed of decode. Uses numpy only."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..machine import cores

PER_THREAD = 256 * 2**20  # bytes that each thread reads, far more than the caches hold
PASSES = 4


def read_bandwidth() -> float:
    """Bytes per second that all physical cores together read from main memory: the best of PASSES passes."""
    threads = cores()
    blocks = [np.ones(PER_THREAD // 4, np.float32) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            list(pool.map(np.max, blocks))
            best = min(best, time.perf_counter() - start)
    return threads * PER_THREAD / best
