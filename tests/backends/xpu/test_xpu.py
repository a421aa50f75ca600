"""The XPU's runner on the CPU: the conformance suite, and models of every architecture."""

from __future__ import annotations

import pytest

from ...accelerator import INTERPRETED
from ..other_device import OnOtherDevice, TinyModels
from .stand_ins import XPU


@pytest.mark.real_otherdevice
class TestXpu(OnOtherDevice):
    backend = "xpu"
    device = XPU


@pytest.mark.real_otherdevice
class TestXpuModels(TinyModels):
    backend = "xpu"
    device = XPU
    graphs = ("off",) if INTERPRETED else ("off", "full")  # a tape records torch's ops alone
