"""NVIDIA GPUs. This version finds them but has no runner for them yet."""

from __future__ import annotations

import ctypes

from ...engine.runner import DeviceInfo, Unavailable

name = "cuda"


def probe() -> DeviceInfo | Unavailable:
    """Asks the driver's own library, so no tensor library is needed for a no."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Unavailable(name, "no NVIDIA driver (libcuda.so.1 not found)")
    status = driver.cuInit(0)
    if status != 0:
        return Unavailable(name, f"the NVIDIA driver does not start (cuInit gave error {status})")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return Unavailable(name, "the NVIDIA driver shows no GPU (see CUDA_VISIBLE_DEVICES)")
    title = ctypes.create_string_buffer(128)
    driver.cuDeviceGetName(title, len(title), 0)
    found = title.value.decode(errors="replace")
    return Unavailable(name, f"{found} is present ({count.value} in all), but this version has no CUDA runner yet")
