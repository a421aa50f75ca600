"""The accelerator of torch on this machine, under the name of its backend. Tests of kernels run on it."""

from __future__ import annotations

import os
from typing import NamedTuple

from localllm.backends import ORDER

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter computes the kernels on the CPU
TRITON = ("cuda", "xpu")  # torch's types of the devices that Triton compiles for; AMD GPUs have the type cuda


class Accelerator(NamedTuple):
    backend: str  # a name in backends.ORDER
    device: str  # torch's type of the device


def accelerator() -> Accelerator | None:
    """None if torch finds no device, or one that no backend uses."""
    import torch  # not at the start of every test session

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    backend = "hip" if torch.version.hip else device.type
    return Accelerator(backend, device.type) if backend in ORDER else None


def triton_device() -> str:
    """torch's type of the device that computes the tests of Triton kernels; empty if they cannot run here."""
    if INTERPRETED:
        return "cpu"
    present = accelerator()
    return present.device if present and present.device in TRITON else ""
