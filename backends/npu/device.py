"""An Ascend NPU as a torch device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
import torch_npu

from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import Runner
from ..pytorch.device import Device
from ..pytorch.opening import open_runner, plan_memory
from ..pytorch.streams import SideStream
from .attention import OTHERS
from .defaults import MAX_GRAPHS, PAGE_SIZE, tier
from .memory import METER, free_memory, total_memory
from .ops import OPS
from .recorder import NpuRecorder


def _with(paged: Callable[..., torch.Tensor], device: Device) -> Device:
    return replace(device, ops=replace(device.ops, attention=replace(device.ops.attention, paged=paged)))


DEVICE = Device(
    "npu",
    "npu",
    torch_npu.npu,
    OPS,
    dtype=torch.bfloat16,
    overlap=True,
    pinned=True,
    cache_share=0.8,  # as SGLang's mem_fraction_static on this chip
    context_share=0.9,
    meter=METER,
    page_size=PAGE_SIZE,
    row_tokens=None,
    recorder=NpuRecorder,
    max_graphs=MAX_GRAPHS,
    streams=partial(SideStream, torch_npu.npu),
    graphs="full",  # not measured
    attentions=MappingProxyType({name: partial(_with, paged) for name, paged in OTHERS.items()}),
    step_seconds=600.0,  # a first step may compile kernels
)


def open_on_npu(files: ModelFiles, options: LoadOptions) -> Runner:
    """Load a model on the first NPU. Raises ModelRefused, SettingRefused or RunnerFailed."""
    return open_runner(files, options, _device(), free_memory())


def plan_on_npu(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    """The memory of a model on the first NPU. Raises ModelRefused or SettingRefused."""
    return plan_memory(files, options, _device(), free_memory())


def _device() -> Device:
    """DEVICE with the defaults for the memory of this NPU."""
    _, step_tokens, captured_rows = tier(total_memory())
    return replace(DEVICE, step_tokens=step_tokens, captured_rows=captured_rows)
