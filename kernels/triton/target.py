"""The GPU that Triton compiles for, as Triton's own driver describes it: the same for CUDA, HIP and XPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
STREAMS = 32  # of one device that have counters


@dataclass(frozen=True, slots=True)
class Device:
    """The properties that decide how kernels are launched."""

    processors: int
    shared: int  # bytes of shared memory a program may take
    converts_fp8: bool  # in hardware
    narrow: bool = False  # blocks on their way to the matrix units are held in the registers of 32 lanes
    compiler: str = ""  # Triton's backend: cuda, hip or xpu; empty: the interpreter

    @property
    def mixed_products(self) -> bool:
        """Whether torch multiplies 16-bit matrices into float32, and int8 matrices into int32."""
        return self.compiler in ("cuda", "hip")


@cache
def described(device: torch.device) -> Device:
    """Of the active driver's device, or of the interpreter."""
    if INTERPRETED or device.type == "cpu":
        return Device(processors=8, shared=227 << 10, converts_fp8=False)
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(device.index or 0)
    target = driver.get_current_target()
    return Device(
        properties["multiprocessor_count"],
        properties["max_shared_mem"],
        converts_fp8=target.backend == "cuda" and target.arch >= 89,
        narrow=target.backend == "hip" and target.warp_size == 32,
        compiler=target.backend,
    )


class Counters:
    """Zeros of a device that kernels leave as zeros, one row for each stream: two streams may run the same kernel.

    Allocated once, at a first call; a capture finds its stream's row allocated and compiled for.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._rows = torch.zeros(STREAMS, size, dtype=torch.int32, device=device).unbind()
        self._of: dict[int, Tensor] = {}
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # other streams do not wait for the zeros

    def row(self, stream: int) -> Tensor:
        """[size] int32. Raises RuntimeError where more streams than STREAMS have come."""
        if stream not in self._of:
            if len(self._of) == STREAMS:
                raise RuntimeError(f"Triton kernels ran on {STREAMS} streams of one device, and this is another one")
            self._of[stream] = self._rows[len(self._of)]
        return self._of[stream]


@cache
def _counters(device: torch.device, size: int) -> Counters:
    return Counters(device, size)


def counters(device: torch.device, size: int) -> Tensor:
    """[size] int32 zeros of the device's current stream, between calls."""
    on_gpu = not INTERPRETED and device.type != "cpu"
    stream = triton.runtime.driver.active.get_current_stream(device.index or 0) if on_gpu else 0
    return _counters(device, size).row(stream)
