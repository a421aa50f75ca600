"""The devices that kernels.py measures: how to time a call, and peak rates, which are measured in the same process."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from localllm.kernels.compiled.library import find_library
from localllm.kernels.ops import Ops

# Values of the enum Bound in kernels/cpu/bound.h. READ counts bytes; the other values count operations.
READ, F32, BF16, INT8, TILE_BF16, TILE_INT8 = range(6)
KINDS = {"f32": F32, "bf16": BF16, "int8": INT8, "tile_bf16": TILE_BF16, "tile_int8": TILE_INT8}
L3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
MIN_SECONDS = 0.04  # shortest time of a measurement
PAUSE = 0.02  # seconds before a measurement: idle threads of the function measured before may spin until then
SIDE = 8192  # rows and columns of the matrices that are multiplied

Call = Callable[..., object]
Sets = Sequence[Mapping[str, Any]]


class Device(Protocol):
    """A device with its ops. `rates`: operations per second by kind of instruction, as far as they are measured."""

    name: str  # empty: the CPU
    torch_name: str
    ops: Ops
    dtype: torch.dtype  # of activations
    beyond_caches: int  # bytes, much more than the caches have
    rates: Mapping[str, float]

    def read(self) -> float:
        """Bytes per second."""

    def timer(self, function: Call, sets: Sets) -> Callable[[], float]:
        """A function that returns the seconds of a call. The calls have the sets of arguments in turn."""


class Cpu:
    """The CPU with `threads` threads."""

    name = ""
    torch_name = "cpu"

    def __init__(self, threads: int) -> None:
        from localllm.backends.cpu.device import OPS
        from localllm.backends.machine import BF16_FLAGS, cpu_flags

        torch.set_num_threads(threads)
        torch.ops.localllm.use_threads(threads)
        self.ops = OPS
        self.dtype = torch.bfloat16 if cpu_flags() & BF16_FLAGS else torch.float32
        size = L3.read_text().strip() if L3.exists() else "0K"
        self.beyond_caches = max(256 * 2**20, 4 * 1024 * int(size.rstrip("K")))  # a server may have 300 MiB of cache
        self._library = ctypes.CDLL(str(find_library()))
        self._library.localllm_bound.restype = ctypes.c_double
        self._library.localllm_bound.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._buffer = torch.empty(2 * self.beyond_caches, dtype=torch.uint8)
        torch.ops.localllm.first_touch(self._buffer, 4096)
        self._buffer.fill_(1)
        rates = {name: self._rate(kind) for name, kind in KINDS.items()}
        self.rates = {name: rate for name, rate in rates.items() if rate}

    def read(self) -> float:
        """The best of three runs of all threads; the first wakes the threads."""
        return max(done / seconds for done, seconds in (self._run(READ, 1) for _ in range(3)))

    def _rate(self, kind: int) -> float:
        """The best of three runs; 0 if the ISA variant has no such instruction."""
        repeats = 1000
        while self._run(kind, repeats)[1] < MIN_SECONDS / 2 and self._run(kind, 1)[0]:
            repeats *= 4
        return max(done / seconds for done, seconds in (self._run(kind, repeats) for _ in range(3)))

    def _run(self, kind: int, repeats: int) -> tuple[float, float]:
        start = time.perf_counter()
        done: float = self._library.localllm_bound(kind, self._buffer.data_ptr(), len(self._buffer), repeats)
        return done, time.perf_counter() - start

    def timer(self, function: Call, sets: Sets) -> Callable[[], float]:
        def seconds() -> float:
            time.sleep(PAUSE)
            function(**sets[0])
            start = time.perf_counter()
            calls = 0
            while calls < 2 or time.perf_counter() - start < MIN_SECONDS:
                calls += 1
                function(**sets[calls % len(sets)])
            return (time.perf_counter() - start) / calls

        return seconds


class Cuda:
    """The current NVIDIA GPU. A timed call is part of a replayed graph."""

    torch_name = "cuda"
    dtype = torch.bfloat16
    beyond_caches = 3 * 10**8

    def __init__(self) -> None:
        from localllm.backends.cuda.ops import OPS
        from localllm.backends.pytorch.gpu import bandwidth

        self.name = torch.cuda.get_device_name()
        self.ops = OPS
        self._bandwidth = bandwidth
        matrices = torch.randn(2, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        self.rates = {"bf16": 2 * SIDE**3 / bandwidth.seconds(torch.cuda, lambda: torch.mm(matrices[0], matrices[1]))}

    def read(self) -> float:
        return self._bandwidth.read_bandwidth(torch.cuda, self._bandwidth.triton_readers, 2**31) or 0.0

    def timer(self, function: Call, sets: Sets) -> Callable[[], float]:
        for arguments in sets[:2]:
            function(**arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for arguments in sets:
                function(**arguments)
        return lambda: self._bandwidth.seconds(torch.cuda, graph.replay) / len(sets)
