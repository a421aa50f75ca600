"""An NVIDIA GPU as a torch device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType

import torch

from ...engine.errors import SettingRefused
from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import Runner
from ...kernels.compiled.library import find_cuda_library
from ...kernels.gpu.limits import gpu_limits
from ...kernels.gpu.properties import gpu_properties
from ...kernels.ops.layer import Layer
from ...kernels.ops.register import usable
from ...kernels.triton.problem import triton_problem
from ..pytorch.choice import lora_backends
from ..pytorch.device import Device
from ..pytorch.gpu import triton
from ..pytorch.gpu.memory import GpuMemory
from ..pytorch.graphs.cuda import CudaRecorder
from ..pytorch.opening import open_runner, plan_memory, with_self_test
from ..pytorch.streams import SideStream
from .driver import Driver
from .ops import KERNELS, MISSING, OPS

# Bytes that the driver and libraries take in the first steps: code of kernels, and workspaces of cuBLAS on each stream.
LIBRARIES = 288 * 2**20
GRAPH = 192 * 2**10  # bytes that the driver takes for a graph of a few kernels
MEMORY = GpuMemory(torch.cuda)


def _flashinfer(device: Device) -> Device:
    """`device` with FlashInfer's attention. Raises SettingRefused if FlashInfer is not installed."""
    if find_spec("flashinfer") is None:
        raise SettingRefused(
            "attention flashinfer: FlashInfer is not installed",
            "install localllm[flashinfer], or set attention to auto",
            setting="attention",
        )
    from ...kernels.flashinfer.attention import attention

    # Leave out the device's op `decoders`: it computes all layers with its own attention, not with FlashInfer's.
    ops = device.ops
    layer = Layer(decoder=ops.layer.decoder, prepare=ops.layer.prepare)
    ops = replace(ops, attention=attention(ops.attention), layer=layer)
    return replace(device, ops=ops, captures_attention=False)


DEVICE = Device(
    "cuda",
    "cuda",
    torch.cuda,
    OPS,
    dtype=torch.bfloat16,
    overlap=True,
    pinned=True,
    cache_share=0.85,  # the rest is for adapters, other programs and fragments
    context_share=0.95,
    meter=MEMORY.meter(LIBRARIES, GRAPH),
    step_tokens=2048,
    row_tokens=None,
    fp8_cache=True,
    recorder=CudaRecorder,
    streams=partial(SideStream, torch.cuda),
    graphs="breakable",  # steps are as fast as with "split", and models open faster
    attentions=MappingProxyType({"flashinfer": _flashinfer}),
    kernels=KERNELS,
    lora_backends=lora_backends(KERNELS),
    step_seconds=120.0,  # most steps take less than a second, but a first step may compile kernels
)

LAUNCH_SECONDS = 66e-6  # time in which the host launches the kernels of one layer
DELAY_SECONDS = 0.25  # maximum delay of the rows that decode by a prefill step


def _versions() -> Iterator[str]:
    """Versions that a self-test's verdicts depend on, in addition to those of torch and the GPU: the versions of the
    driver, Triton and the CUDA C++ kernels, and the limits of gpu_limits."""
    yield Driver().version()
    if triton_problem():
        yield "no Triton"
    else:
        yield triton.version()
    if not MISSING:
        yield hashlib.sha256(find_cuda_library().read_bytes()).hexdigest()
    yield from filter(None, [gpu_limits().describe()])


def open_on_cuda(files: ModelFiles, options: LoadOptions) -> Runner:
    """Load a model on the first GPU. Raises ModelRefused, SettingRefused or RunnerFailed."""
    MEMORY.limit_allocator()
    free = MEMORY.free()
    device = replace(_device(files), warnings=tuple(_missing_kernels()))
    device = with_self_test(device, options, torch.cuda.get_device_name(), _versions())
    return open_runner(files, options, device, free)


def plan_on_cuda(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    """The memory of a model on the first GPU. Raises ModelRefused or SettingRefused."""
    return plan_memory(files, options, _device(files), MEMORY.free())


def _device(files: ModelFiles) -> Device:
    """DEVICE with the values that depend on the model and the GPU."""
    gpu = gpu_properties(torch.device("cuda", 0))
    kernels = usable(KERNELS, gpu.capability)
    return replace(
        DEVICE,
        ops=kernels[0].ops,
        kernels=kernels,
        capability=gpu.capability,
        dtype=_dtype(files),
        layer_work=LAUNCH_SECONDS * gpu.multiplications,
        step_work=DELAY_SECONDS * gpu.multiplications,
    )


def _missing_kernels() -> Iterator[str]:
    """Warnings about kernels that this machine lacks."""
    if MISSING:
        yield f"the CUDA C++ kernels are not used (slower): {MISSING}"
    yield from triton.warnings(triton_problem())


def _dtype(files: ModelFiles) -> torch.dtype:
    """The dtype of activations. Models with float32 weights are small, or need the precision."""
    return torch.float32 if files.config.dtype == "float32" else torch.bfloat16
