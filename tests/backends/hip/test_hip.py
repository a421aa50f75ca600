"""HIP's runner on the CPU: the conformance suite, and models of every architecture.

The ops are the references; in Triton's interpreter, they are the Triton kernels (test_gpus_interpreted.py).
"""

from __future__ import annotations

import pytest

from localllm.backends.hip.device import DEVICE
from localllm.kernels.ops.register import REFERENCES

from ...accelerator import INTERPRETED
from ..other_device import OnOtherDevice, TinyModels, on_cpu

HIP = on_cpu(DEVICE, DEVICE.kernels if INTERPRETED else (REFERENCES,))


@pytest.mark.real_otherdevice
class TestHip(OnOtherDevice):
    backend = "hip"
    device = HIP


@pytest.mark.real_otherdevice
class TestHipModels(TinyModels):
    backend = "hip"
    device = HIP
    graphs = ("off",) if INTERPRETED else ("full",)  # a tape records torch's ops alone
