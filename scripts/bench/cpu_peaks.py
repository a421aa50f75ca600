"""Peak rates of this CPU, measured by loops of only reads or only one kind of instruction (kernels/cpu/bound.cpp)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from localllm.kernels.compiled.library import find_library

# Values of the enum Bound in bound.h. READ counts bytes; the other values count operations.
READ, F32, BF16, INT8, TILE_BF16, TILE_INT8 = range(6)
KINDS: Mapping[str, int] = {
    "read": READ,
    "f32": F32,
    "bf16": BF16,
    "int8": INT8,
    "tile_bf16": TILE_BF16,
    "tile_int8": TILE_INT8,
}

_L3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
MIN_SECONDS = 0.02  # shortest time of a measurement


def beyond_caches() -> int:
    """The size in bytes of a buffer that is much larger than the caches; a server may have 300 MiB of cache."""
    size = _L3.read_text().strip() if _L3.exists() else ""
    level3 = int(size[:-1]) * 1024 if size.endswith("K") else 0
    return max(256 * 2**20, 4 * level3)


class CpuPeaks:
    """Measures peak rates. Each call uses the ISA variant and the number of threads that are set at that time."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(find_library()))
        self._library.localllm_bound.restype = ctypes.c_double
        self._library.localllm_bound.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._buffer = torch.empty(2 * beyond_caches(), dtype=torch.uint8)
        torch.ops.localllm.first_touch(self._buffer, 4096)
        self._buffer.fill_(1)

    @property
    def buffer(self) -> int:
        """The number of bytes that `read` reads."""
        return len(self._buffer)

    def read(self) -> float:
        """Bytes per second when all threads read the buffer: the best of three runs; the first wakes the threads."""
        return max(done / seconds for done, seconds in (self._run(READ, 1) for _ in range(3)))

    def measure(self, name: str) -> float:
        """Bytes or operations per second, the best of three runs; 0 if the ISA variant has no such instruction."""
        if name == "read":
            return self.read()
        repeats = 1000
        while True:
            done, seconds = self._run(KINDS[name], repeats)
            if done == 0:
                return 0.0
            if seconds >= MIN_SECONDS:
                break
            repeats *= 4
        runs = [self._run(KINDS[name], repeats) for _ in range(3)]
        return max(done / seconds for done, seconds in runs)

    def all(self) -> dict[str, float]:
        return {name: self.measure(name) for name in KINDS}

    def _run(self, kind: int, repeats: int) -> tuple[float, float]:
        start = time.perf_counter()
        done: float = self._library.localllm_bound(kind, self._buffer.data_ptr(), len(self._buffer), repeats)
        return done, time.perf_counter() - start
