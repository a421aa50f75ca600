"""An Ascend NPU as a torch device. Its functions, not this module, import torch_npu: doctor reads OPS without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from ...engine.errors import SettingRefused
from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import RARE, LoadOptions
from ...engine.runner import Runner
from ..pytorch.choice import lora_backends
from ..pytorch.device import Device
from ..pytorch.opening import open_runner, plan_memory, with_self_test
from ..pytorch.selftest import sources_hash
from ..pytorch.streams import SideStream
from .attention import INT8_COPY, OTHERS
from .defaults import MAX_GRAPHS, PAGE_SIZE, tier
from .formats import WeightFormats
from .installation import package_version
from .ops import KERNELS, OPS
from .prefetch import with_prefetch


def open_on_npu(files: ModelFiles, options: LoadOptions) -> Runner:
    """Load a model on the first NPU. Raises ModelRefused, SettingRefused or RunnerFailed."""
    import torch_npu

    from .memory import MEMORY

    npu = with_self_test(device(options), options, torch_npu.npu.get_device_name(), _versions())
    if options.prefetch == "on":
        npu = replace(npu, ops=with_prefetch(npu.ops, npu.streams()))
    return open_runner(files, options, npu, MEMORY.free())


def plan_on_npu(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    """The memory of a model on the first NPU. Raises ModelRefused or SettingRefused."""
    from .memory import MEMORY

    return plan_memory(files, options, device(options), MEMORY.free())


def _versions() -> Iterator[str]:
    """Versions for the verdicts of the self-test, beside those of torch and the chip."""
    import torch_npu

    yield package_version("torch_npu")
    yield str(torch_npu.npu.utils.get_cann_version())
    yield sources_hash(Path(__file__).parent)


def _with(paged: Callable[..., torch.Tensor], device: Device) -> Device:
    return replace(device, ops=replace(device.ops, attention=replace(device.ops.attention, paged=paged)))


def _check_graphs(options: LoadOptions) -> None:
    """Raises SettingRefused for graphs that another option excludes."""
    if options.graphs == "split" and options.compiler == "inductor":
        message = "graphs split is not supported by npu: Inductor does not compile for NPUs"
        raise SettingRefused(message, "set graphs to breakable, or LOCALLLM_DEV_COMPILER to eager", setting="graphs")
    if options.graphs in ("split", "breakable") and options.prefetch == "on":
        message = f"graphs {options.graphs} is not supported with prefetch: its captures end before the prefetch"
        raise SettingRefused(message, "set graphs to full, or LOCALLLM_DEV_PREFETCH to off", setting="graphs")


def device(options: LoadOptions = LoadOptions()) -> Device:
    """The first NPU, with the defaults for its memory, for one model. Raises SettingRefused."""
    _check_graphs(options)
    import torch_npu

    from .memory import MEMORY, METER
    from .recorder import NpuRecorder

    module = torch_npu.npu
    _, step_tokens, captured_rows = tier(MEMORY.total())
    return Device(
        "npu",
        "npu",
        module,
        OPS,
        dtype=torch.bfloat16,
        kernels=KERNELS,
        overlap=True,
        pinned=True,
        cache_share=0.8,  # as SGLang's mem_fraction_static on this chip
        context_share=0.9,
        meter=METER,
        page_size=PAGE_SIZE,
        step_tokens=step_tokens,
        row_tokens=None,
        latent_parts=True,
        int8_cache=True,
        int8_copy=INT8_COPY,
        static_inputs=True,
        recorder=NpuRecorder,
        captured_rows=captured_rows,
        max_graphs=MAX_GRAPHS,
        streams=partial(SideStream, module),
        graphs="full",  # not measured
        attentions=MappingProxyType({name: partial(_with, paged) for name, paged in OTHERS.items()}),
        lora_backends=lora_backends(KERNELS),
        layout=WeightFormats(plain=options.weight_layout == "plain"),
        options=frozenset(RARE),
        step_seconds=600.0,  # a first step may compile kernels
    )
