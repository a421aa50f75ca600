"""An Intel GPU as a torch device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions, check_supported
from ...engine.runner import Runner
from ..pytorch.choice import lora_backends
from ..pytorch.device import Device
from ..pytorch.gpu import triton
from ..pytorch.opening import open_runner, plan_memory, with_self_test
from .installation import triton_problem
from .memory import MEMORY, METER, driver_version
from .ops import KERNELS, OPS
from .recorder import XpuRecorder

DEVICE = Device(
    "xpu",
    "xpu",
    torch.xpu,
    OPS,
    dtype=torch.bfloat16,
    kernels=KERNELS,
    overlap=True,
    pinned=True,
    cache_share=0.85,
    context_share=0.95,
    meter=METER,
    row_tokens=None,
    recorder=XpuRecorder,
    graphs="off",
    lora_backends=lora_backends(KERNELS),
    # No second stream: a SYCL graph has the commands of one queue, and only graphs use a second stream.
    step_seconds=600.0,  # a first step may compile kernels
)
GRAPHS = ("auto", "off", "full")  # the values of the option `graphs`: torch cannot capture prefill steps yet


def open_on_xpu(files: ModelFiles, options: LoadOptions) -> Runner:
    """Load a model on the first GPU. Raises ModelRefused, SettingRefused or RunnerFailed."""
    MEMORY.limit_allocator()
    device = replace(device_for(files, options), warnings=triton.warnings(triton_problem()))
    versions = driver_version(), *triton.versions(triton_problem(), Path(__file__).parent)
    device = with_self_test(device, options, torch.xpu.get_device_name(), versions)
    return open_runner(files, options, device, MEMORY.free())


def plan_on_xpu(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    """The memory of a model on the first GPU. Raises ModelRefused or SettingRefused."""
    return plan_memory(files, options, device_for(files, options), MEMORY.free())


def device_for(files: ModelFiles, options: LoadOptions) -> Device:
    """DEVICE with the dtype of activations. Models with float32 weights are small, or need the precision. Raises
    SettingRefused."""
    check_supported(options, {"graphs": GRAPHS}, DEVICE.name)
    is_wide = files.config.dtype == "float32" or not torch.xpu.is_bf16_supported()
    return replace(DEVICE, dtype=torch.float32) if is_wide else DEVICE
