"""Queries the GPUs through the libraries of NVIDIA's driver: no tensor library, no context on the device."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass

_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
_MINOR = 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…


class DriverFailed(Exception):
    """No GPU can be used. The message is for users."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    count: int  # number of GPUs
    capability: tuple[int, int]
    memory: int  # bytes
    free: int  # bytes


class _MemoryInfo(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Driver:
    """The CUDA driver. Raises DriverFailed if it is missing or does not start."""

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
        cuda = ctypes.c_int()
        with suppress(OSError):
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
                return text.value.decode(errors="replace")
        self._cuda.cuDriverGetVersion(ctypes.byref(cuda))
        return f"CUDA {cuda.value}"

    def first(self) -> Gpu:
        """GPU 0 of CUDA. Raises DriverFailed if there is none."""
        count = ctypes.c_int()
        self._cuda.cuDeviceGetCount(ctypes.byref(count))
        if count.value == 0:
            raise DriverFailed("the NVIDIA driver shows no GPU (see CUDA_VISIBLE_DEVICES)")
        title = ctypes.create_string_buffer(128)
        self._cuda.cuDeviceGetName(title, len(title), 0)
        total = ctypes.c_size_t()
        self._cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0)
        capability = self._attribute(_MAJOR), self._attribute(_MINOR)
        return Gpu(title.value.decode(errors="replace"), count.value, capability, total.value, self._free(total.value))

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._cuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
        return value.value

    def _free(self, total: int) -> int:
        """Bytes of free memory; `total` without NVML."""
        address = ctypes.create_string_buffer(32)
        info = _MemoryInfo()
        device = ctypes.c_void_p()
        with suppress(OSError):
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            if (
                self._cuda.cuDeviceGetPCIBusId(address, len(address), 0) == 0
                and nvml.nvmlInit_v2() == 0
                and nvml.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(device)) == 0
                and nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)) == 0
            ):
                return min(total, int(info.free))
        return total
