"""The roof over decoding: how fast this machine reads memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

from ...backends import load
from ...engine.runner import DeviceInfo

PER_THREAD = 256 * 2**20  # bytes; far more than caches hold
PASSES = 4


def shares_main_memory(backend: str) -> bool:
    """Whether the backend computes from the machine's own memory."""
    found = load(backend).probe()
    return isinstance(found, DeviceInfo) and found.main_memory


def read_bandwidth() -> float:
    """Bytes per second that all physical cores together read, the best of a few passes."""
    threads = psutil.cpu_count(logical=False) or 1
    blocks = [np.ones(PER_THREAD // 4, np.float32) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            list(pool.map(np.max, blocks))
            best = min(best, time.perf_counter() - start)
    return threads * PER_THREAD / best
