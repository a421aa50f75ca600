"""The CPU as a torch device."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...engine.files.model_files import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import Runner
from ...kernels.compiled.library import LibraryMissing
from ...kernels.ops import Ops
from ...kernels.ops.register import REFERENCES, KernelSet
from ..machine import BF16_FLAGS, BF16_VARIANTS, cores, cpu_flags, variant
from ..pytorch.choice import lora_backends
from ..pytorch.device import Device
from ..pytorch.opening import open_runner
from ..pytorch.slot_memory import MainMemory

try:
    from .ops import OPS

    KERNELS: tuple[KernelSet, ...] = (KernelSet("cpp", OPS), REFERENCES)
    MISSING = ""
except LibraryMissing as error:
    OPS = Ops()
    KERNELS = (REFERENCES,)
    MISSING = str(error)

# Activations are float32, as in transformers on CPUs: float32 represents every stored dtype exactly. Without bfloat16
# instructions it is as fast as bfloat16, because the weights keep their stored dtype.
# A step counts as hung after one hour: even slow CPUs compute a prefill chunk of an 8B model faster.
DEVICE = Device(
    "cpu",
    "cpu",
    torch.cpu,
    OPS,
    dtype=torch.float32,
    kernels=KERNELS,
    lora_backends=lora_backends(KERNELS),
    warnings=(f"the CPU kernels are not used (slower): {MISSING}",) if MISSING else (),
    slot_memory=MainMemory,
    step_seconds=3600.0,
)


def open_on_cpu(files: ModelFiles, options: LoadOptions, free: int) -> Runner:
    """Load a model on the CPU, which has `free` bytes of free memory. Sets the number of threads of the process."""
    threads = _use_threads(options.threads)
    torch.set_num_threads(threads)
    runner = open_runner(files, options, device_for(files, cpu_flags()), free)
    if not (MISSING or options.ops):
        torch.set_num_threads(1)  # the kernels compute nearly everything; torch's threads would compete with theirs
    return runner


def device_for(files: ModelFiles, flags: frozenset[str]) -> Device:
    """DEVICE with the activation dtype that is fastest for these files on a processor with these flags."""
    if files.config.dtype != "bfloat16":
        return DEVICE
    # bfloat16 matrix instructions make prefill and decode of every model size faster, with and without our kernels.
    has_bfloat16 = bool(flags & BF16_FLAGS) if MISSING else variant(flags) in BF16_VARIANTS
    return replace(DEVICE, dtype=torch.bfloat16) if has_bfloat16 else DEVICE


def _use_threads(count: int | None) -> int:
    """Set and return the number of threads of the kernels. None: the value of LOCALLLM_THREADS or OMP_NUM_THREADS, or
    one thread for each core."""
    if MISSING:
        return count or cores()
    threads: int = torch.ops.localllm.use_threads(count or 0)
    return threads
