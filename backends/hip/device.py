"""An AMD GPU as a torch device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import Runner
from ..pytorch.choice import lora_backends
from ..pytorch.device import Device
from ..pytorch.gpu import triton
from ..pytorch.gpu.memory import GpuMemory
from ..pytorch.graphs.cuda import CudaRecorder
from ..pytorch.opening import open_runner, plan_memory, with_self_test
from ..pytorch.streams import SideStream
from .gpus import Gpu
from .installation import rocm, triton_problem, visible
from .memory import GRAPH, LIBRARIES, MEMORY, SHARED
from .ops import KERNELS, OPS

DEVICE = Device(
    "hip",
    "cuda",
    torch.cuda,
    OPS,
    dtype=torch.bfloat16,
    kernels=KERNELS,
    overlap=True,
    pinned=True,
    cache_share=0.85,
    context_share=0.95,
    meter=MEMORY.meter(LIBRARIES, GRAPH),
    step_tokens=2048,
    row_tokens=None,
    fp8_cache=True,
    recorder=CudaRecorder,  # torch.cuda.CUDAGraph captures HIP graphs
    streams=partial(SideStream, torch.cuda),
    graphs="full",  # not measured
    lora_backends=lora_backends(KERNELS),
    step_seconds=600.0,  # a first step may compile kernels
)
LAUNCH_SECONDS = 66e-6  # time in which the host launches the kernels of one layer; measured on an NVIDIA GPU
DELAY_SECONDS = 0.25  # maximum delay of the rows that decode by a prefill step


def open_on_hip(files: ModelFiles, options: LoadOptions) -> Runner:
    """Load a model on the first GPU. Raises ModelRefused, SettingRefused or RunnerFailed."""
    gpu = visible()[0]
    _memory(gpu).limit_allocator()
    device = device_for(files, gpu)
    device = with_self_test(device, options, gpu.title, _versions())
    return open_runner(files, options, device, _memory(gpu).free())


def plan_on_hip(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    """The memory of a model on the first GPU. Raises ModelRefused or SettingRefused."""
    gpu = visible()[0]
    return plan_memory(files, options, device_for(files, gpu), _memory(gpu).free())


def device_for(files: ModelFiles, gpu: Gpu) -> Device:
    """DEVICE with the values that depend on the model and the GPU. Models with float32 weights are small, or need the
    precision."""
    device = replace(
        DEVICE,
        capability=tuple(gpu.version),
        dtype=torch.float32 if files.config.dtype == "float32" else DEVICE.dtype,
        layer_work=LAUNCH_SECONDS * gpu.multiplications or DEVICE.layer_work,
        step_work=DELAY_SECONDS * gpu.multiplications or DEVICE.step_work,
        warnings=triton.warnings(triton_problem()),
    )
    if gpu.is_integrated:  # other programs need the memory, too
        device = replace(device, cache_share=0.5, context_share=0.75, meter=SHARED.meter(LIBRARIES, GRAPH))
    return device


def _memory(gpu: Gpu) -> GpuMemory:
    return SHARED if gpu.is_integrated else MEMORY


def _versions() -> tuple[str, ...]:
    return rocm(), *triton.versions(triton_problem(), Path(__file__).parent)
