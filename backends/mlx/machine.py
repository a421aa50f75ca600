"""Facts about the machine that MLX runs on. The import of this module does not import MLX."""

from __future__ import annotations

import statistics
import subprocess
import time

import psutil

BYTES = 2**29  # size of the array, far larger than the caches of any processor
REPEATS = 5


def memory() -> tuple[int, int]:
    """(total, free) bytes of main memory, which Apple's GPUs also use."""
    main = psutil.virtual_memory()
    return main.total, main.available


def apple_chip() -> str:
    """The name of the chip, e.g. "Apple M4 Pro"."""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "Apple silicon"


def read_bandwidth() -> float:
    """Bytes per second at which MLX's device sums an array: the median of some repeats."""
    import mlx.core as mx

    data = mx.random.normal((BYTES // 4,))
    mx.eval(data)
    seconds = []
    for _ in range(REPEATS + 1):  # the first sum also compiles its kernel
        start = time.perf_counter()
        mx.eval(mx.sum(data))
        seconds.append(time.perf_counter() - start)
    return BYTES / statistics.median(seconds[1:])
