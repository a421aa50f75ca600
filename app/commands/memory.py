"""The roof over decoding: how fast this machine reads memory, and how many bytes one token makes a model read."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def weights_read(folder: Path, itemsize: int) -> int:
    """Bytes of weights that one token reads: all but an embedding table that is not the output layer too."""
    elements: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                elements[name] = int(np.prod(tensor["shape"], dtype=np.int64))
    if any(name.endswith("lm_head.weight") for name in elements):
        elements = {name: count for name, count in elements.items() if not name.endswith("embed_tokens.weight")}
    return itemsize * sum(elements.values())
