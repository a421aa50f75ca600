"""The GPU that Triton compiles for: one record of what differs between CUDA, HIP and XPU.

Importing this module activates nvidia/driver.py where Triton's own driver cannot be compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..gpu.limits import gpu_limits
from .problem import compiler_problem, driver_supported

if compiler_problem() and driver_supported():
    from .nvidia import driver

    driver.activate()

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})  # dtypes that the kernels support
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
STREAMS = 32  # largest number of streams of a device that run kernels with counters


def supports(x: Tensor) -> bool:
    """True if the kernels support x. False for the fake tensors that torch traces with: they have no memory, so the
    reference is traced."""
    return x.dtype in FLOATS and not isinstance(x, FakeTensor)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What the kernels and their launch parameters depend on. The defaults are those of Triton's interpreter.

    Only the table below names vendors. Everything else in this folder reads these fields.
    """

    lanes: int = 32  # threads of a warp
    precision: Literal["tf32", "ieee"] = "ieee"  # of products of float32 values
    fp8: torch.dtype | None = None  # the float8 format that the GPU has instructions to convert
    assembly: bool = False  # kernels have inline assembly: nvidia/assembly.py
    in_registers: bool = False  # the operands of products stay in registers, so blocks are small
    operands: int = 16 << 10  # bytes of operands that the registers of a warp hold
    float_sums: bool = False  # torch.mm has float32 results for 16-bit matrices (its argument out_dtype)
    integer_sums: bool = False  # torch._int_mm has int32 results for int8 matrices
    descriptors: bool = False  # kernels have tensor descriptors: moe_tiles.py
    overlaps: bool = False  # a kernel can start before the previous kernel has ended: overlap.py

    @property
    def narrow(self) -> bool:
        """True if operands stay in the registers of at most 32 lanes: blocks are even smaller."""
        return self.in_registers and self.lanes <= 32


def _nvidia(arch: Any) -> Target:
    """`arch`: 90 for compute capability 9.0."""
    return Target(
        precision="tf32",
        fp8=torch.float8_e4m3fn if arch >= 89 else None,
        assembly=True,
        float_sums=True,
        integer_sums=True,
        descriptors=arch == 90,
        overlaps=arch >= 90,
    )


# The float8 formats of AMD GPUs, by the start of their names.
_AMD_FP8 = {"gfx94": torch.float8_e4m3fnuz, "gfx95": torch.float8_e4m3fn, "gfx12": torch.float8_e4m3fn}


def _amd(arch: Any) -> Target:
    """`arch`: the name, such as gfx942. Names with four digits (RDNA) have 32 lanes, others (CDNA) 64."""
    is_cdna = len(arch) == len("gfx942")
    return Target(
        lanes=64 if is_cdna else 32,
        fp8=_AMD_FP8.get(arch[:5]),
        in_registers=True,
        operands=8 << 10 if arch.startswith("gfx11") else 16 << 10,  # gfx11: each half of a warp has a copy
        float_sums=torch.__version__ >= "2.10",  # compared as versions; earlier ones refuse them on ROCm
        integer_sums=is_cdna,  # torch 2.12 on gfx1200: the process ends
    )


def _intel(arch: Any) -> Target:
    """`arch`: properties of the device. Kernels with products have the smallest number of lanes, 16 or 8."""
    return Target(lanes=min(arch["sub_group_sizes"]), in_registers=True, operands=8 << 10)


_TARGETS: Mapping[str, Callable[[Any], Target]] = {"cuda": _nvidia, "hip": _amd, "xpu": _intel}


def target_of(backend: str, arch: Any) -> Target:
    """The target with this name of Triton's backend and this architecture, as triton.backends.compiler.GPUTarget has
    them."""
    return _TARGETS[backend](arch)


@dataclass(frozen=True, slots=True)
class Device:
    """The device properties that the launch parameters of kernels depend on."""

    processors: int
    shared: int  # bytes of shared memory that a program may use
    target: Target = field(default_factory=Target)


@cache
def device_properties(device: torch.device) -> Device:
    """The properties of a device, from Triton's active driver; on the CPU those of the Triton interpreter."""
    if INTERPRETED or device.type == "cpu":
        return Device(processors=8, shared=227 << 10)
    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(device.index or 0)
    current = driver.get_current_target()
    processors = properties["multiprocessor_count"]
    shared = properties["max_shared_mem"]
    arch = current.arch
    if current.backend == "cuda":
        limits = gpu_limits()
        major, minor = limits.limit_capability(divmod(arch, 10))
        arch = 10 * major + minor
        processors = limits.limit_processors(processors)
        shared = limits.limit_shared(shared)
    target = target_of(current.backend, arch)
    if getattr(driver, "plain_launches", False):
        target = replace(target, descriptors=False, overlaps=False)
    return Device(processors, shared, target)


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
