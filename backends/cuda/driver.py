"""Queries the GPUs through the libraries of NVIDIA's driver. Loads no tensor library and creates no CUDA context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

from ...kernels.gpu.limits import LimitRefused, gpu_limits

_PROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
_MINOR = 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
_SHARED = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


class DriverFailed(Exception):
    """The driver or the GPU is missing. The message is shown to the user."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU with the limits of gpu_limits, and the number of GPUs."""

    name: str
    count: int  # number of GPUs
    capability: tuple[int, int]
    memory: int  # bytes
    free: int  # bytes of free memory


class _MemoryInfo(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Driver:
    """The CUDA driver. The constructor raises DriverFailed if the driver is missing or does not start."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise DriverFailed("no NVIDIA driver (libcuda.so.1 not found)") from None
        status = self._cuda.cuInit(0)
        if status != 0:
            raise DriverFailed(f"the NVIDIA driver does not start (cuInit gave error {status})")

    def version(self) -> str:
        """The version of the driver; without NVML, the CUDA version that the driver supports."""
        text = ctypes.create_string_buffer(96)
        nvml = _nvml()
        if nvml is not None and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode(errors="replace")
        cuda = ctypes.c_int()
        self._cuda.cuDriverGetVersion(ctypes.byref(cuda))
        return f"CUDA {cuda.value}"

    def capability(self) -> tuple[int, int]:
        """The compute capability of GPU 0, without the limits of gpu_limits."""
        return self._attribute(_MAJOR), self._attribute(_MINOR)

    def first(self) -> Gpu:
        """GPU 0 of CUDA. Raises DriverFailed if there is no GPU, or if it does not reach a limit of gpu_limits."""
        count = ctypes.c_int()
        self._cuda.cuDeviceGetCount(ctypes.byref(count))
        if count.value == 0:
            raise DriverFailed("the NVIDIA driver shows no GPU (see CUDA_VISIBLE_DEVICES)")
        title = ctypes.create_string_buffer(128)
        self._cuda.cuDeviceGetName(title, len(title), 0)
        total = ctypes.c_size_t()
        self._cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0)
        gpu = Gpu(
            title.value.decode(errors="replace"),
            count.value,
            self.capability(),
            total.value,
            self._free(total.value),
        )
        try:
            return self._limited(gpu)
        except LimitRefused as error:
            raise DriverFailed(str(error)) from None

    def _limited(self, gpu: Gpu) -> Gpu:
        """`gpu` with the limits of gpu_limits. Raises LimitRefused if the GPU does not reach one of them."""
        limits = gpu_limits()
        limits.limit_processors(self._attribute(_PROCESSORS))
        limits.limit_shared(self._attribute(_SHARED))
        free, memory = limits.limit_memory(gpu.free, gpu.memory)
        return replace(gpu, capability=limits.limit_capability(gpu.capability), memory=memory, free=free)

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._cuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
        return value.value

    def _free(self, total: int) -> int:
        """Bytes of free memory of GPU 0; `total` if NVML does not answer."""
        nvml = _nvml()
        if nvml is None:
            return total
        address = ctypes.create_string_buffer(32)
        if self._cuda.cuDeviceGetPCIBusId(address, len(address), 0) != 0:
            return total
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(device)) != 0:
            return total
        info = _MemoryInfo()
        status = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info))
        return min(total, int(info.free)) if status == 0 else total


def _nvml() -> ctypes.CDLL | None:
    """NVIDIA's management library (NVML); None if it is missing or does not start."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None
