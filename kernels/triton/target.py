"""The GPU that Triton compiles for, from Triton's driver: one code path for CUDA, HIP and XPU.

Importing this module activates driver.py where Triton's own driver cannot be compiled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..gpu.limits import gpu_limits
from .problem import compiler_problem, driver_supported

if compiler_problem() and driver_supported():
    from . import driver

    driver.activate()

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})  # dtypes that the kernels support
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
STREAMS = 32  # largest number of streams of a device that run kernels with counters


def supports(x: Tensor) -> bool:
    """True if the kernels support x. False for the fake tensors that torch traces with: they have no memory, so the
    reference is traced."""
    return x.dtype in FLOATS and not isinstance(x, FakeTensor)


@dataclass(frozen=True, slots=True)
class Device:
    """The device properties that the launch parameters of kernels depend on."""

    processors: int
    shared: int  # bytes of shared memory that a program may use
    converts_fp8: bool  # the GPU has instructions that convert float8
    narrow: bool = False  # AMD GPU with wavefronts of 32 lanes: matrix operands fill registers, so blocks are small
    is_hopper: bool = False  # NVIDIA GPU of compute capability 9.0, and kernels may have tensor descriptors
    overlaps: bool = False  # a kernel can start before the previous kernel has ended
    compiler: str = ""  # Triton's backend: cuda, hip or xpu; empty: the interpreter

    @property
    def mixed_products(self) -> bool:
        """True if torch has products of 16-bit matrices with float32 results, and of int8 matrices with int32
        results."""
        return self.compiler in ("cuda", "hip")


@cache
def device_properties(device: torch.device) -> Device:
    """The properties of a device, from Triton's active driver; on the CPU those of the Triton interpreter."""
    if INTERPRETED or device.type == "cpu":
        return Device(processors=8, shared=227 << 10, converts_fp8=False)
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(device.index or 0)
    target = driver.get_current_target()
    processors = properties["multiprocessor_count"]
    shared = properties["max_shared_mem"]
    capability = 0, 0
    plain = getattr(driver, "plain_launches", False)
    if target.backend == "cuda":
        limits = gpu_limits()
        capability = limits.limit_capability(divmod(target.arch, 10))
        processors = limits.limit_processors(processors)
        shared = limits.limit_shared(shared)
    return Device(
        processors,
        shared,
        converts_fp8=capability >= (8, 9),
        is_hopper=capability == (9, 0) and not plain,
        overlaps=capability >= (9, 0) and not plain,
        narrow=target.backend == "hip" and target.warp_size == 32,
        compiler=target.backend,
    )


class Counters:
    """Counters of a device, zero before and after each kernel. Each stream has a row, so streams can run concurrently.

    The first call allocates the rows of all streams, so a later capture allocates nothing.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._rows = torch.zeros(STREAMS, size, dtype=torch.int32, device=device).unbind()
        self._of: dict[int, Tensor] = {}
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # other streams do not wait for the kernel that writes the zeros

    def row(self, stream: int) -> Tensor:
        """[size] int32, the counters of the stream. Raises RuntimeError for more than STREAMS streams."""
        if stream not in self._of:
            if len(self._of) == STREAMS:
                raise RuntimeError(
                    f"Triton kernels support at most {STREAMS} streams of one device; this call needs one more"
                )
            self._of[stream] = self._rows[len(self._of)]
        return self._of[stream]


@cache
def _counters(device: torch.device, size: int) -> Counters:
    return Counters(device, size)


def counters(device: torch.device, size: int) -> Tensor:
    """[size] int32 counters of the device's current stream; zero between kernels."""
    on_gpu = not INTERPRETED and device.type != "cpu"
    stream = triton.runtime.driver.active.get_current_stream(device.index or 0) if on_gpu else 0
    return _counters(device, size).row(stream)
