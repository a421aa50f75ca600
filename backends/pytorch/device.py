"""The record that describes a torch device. It has everything in which torch devices differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.batch import Ints
from ...engine.options import Graphs
from ...kernels.ops import Ops
from ...kernels.ops.lora import Lora
from ...kernels.ops.register import REFERENCES, Capability, KernelSet
from ...kernels.ops.streams import InOrder, Streams
from .slot_memory import DeviceMemory, SlotMemory

# Replays captured work for the rows of a step, whose context lengths [rows] are the argument: kernels of some devices
# read them on the host. Work without attention takes NO_ROWS.
Captured = Callable[[Ints], None]
NO_ROWS: Ints = np.empty(0, np.int32)


class Recorder(Protocol):
    """Captures the work of a device and replays it on the same memory, as one graph or in segments.

    All captures of one recorder share one memory pool. A replay overwrites the tensors of other captures, except those
    that are still referenced.
    """

    def session(self) -> AbstractContextManager[None]:
        """A context in which captures begin and end. Work between two captures runs on the same stream."""
        ...

    def begin(self) -> None:
        """Begin a capture."""
        ...

    def end(self) -> Captured:
        """End the capture. The result replays all work since `begin`."""
        ...

    def call(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """The result of function(*inputs). A recorder may capture the call. The function may run code that torch does
        not dispatch."""
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """A view of a captured tensor that does not keep its memory allocated, so later captures may use the memory."""
        ...


@dataclass(frozen=True, slots=True)
class Meter:
    """Measures the memory of a device, so that a load can reserve the workspace that steps need."""

    free: Callable[[], int]  # bytes that this process can still allocate
    release: Callable[[], None]  # returns the unused memory of torch's allocator to the device
    libraries: int  # expected bytes of loaded kernels and of the workspaces of libraries
    graph: int  # bytes of a captured graph, without its intermediate results


class Layout(Protocol):
    """The layout of packed weights in the memory of a device, if it is not that of their bytes in the packed file."""

    def lay_out(self, op: str, weight: Any) -> Any:
        """A packed weight of the product `op` (a field of Linear), on the device, in the layout that the product reads.
        Its tensors keep shapes and dtypes."""
        ...

    def warnings(self) -> Iterable[str]:
        """Warnings about the weights that are laid out so far."""
        ...


class AsPacked:
    """Weights stay as they are packed."""

    def lay_out(self, op: str, weight: Any) -> Any:
        return weight

    def warnings(self) -> Iterable[str]:
        return ()


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device with its ops and limits. Code with this record does not check the type of the device."""

    name: str  # name of the backend
    type: str  # torch's device type; "cuda" for HIP
    module: ModuleType  # torch.cpu, torch.cuda, …; its Event marks the end of a step
    ops: Ops
    dtype: torch.dtype  # dtype of activations if LoadOptions.dtype is "auto"
    kernels: tuple[KernelSet, ...] = (REFERENCES,)  # the sources of `ops`, the fastest first and the references last
    capability: Capability = ()  # that the kernels of plug-ins may need; empty: the device has no such number
    overlap: bool = False  # whether a step runs while the host plans the next step
    pinned: bool = False  # whether copies to the device use page-locked host memory
    cache_share: float = 0.25  # fraction of the free memory after loading that the KV cache may use
    context_share: float = 0.0  # as cache_share, if one sequence of the maximum context needs more than cache_share
    page_size: int = 16  # tokens per page of the KV cache
    step_tokens: int = 512  # maximum number of tokens in a step; larger steps delay the rows that decode
    row_tokens: int | None = 512  # tokens per row in a KV cache of automatic size; None: the maximum context
    fp8_cache: bool = False  # whether the KV cache may be float8_e4m3fn
    int8_cache: bool = False  # whether the KV cache may be int8, with a scale for each head of a token
    int8_copy: int = 0  # bytes for each key number of a row, if a prefill step converts the row's int8 pages; 0: none
    static_inputs: bool = False  # whether the int8 product rounds activations by a static scale: see Int8.inputs
    latent_parts: bool = False  # whether a latent cache stores rotated keys and latents apart: see step.Cache
    recorder: Callable[[], Recorder] | None = None  # None: steps cannot be captured
    # A second stream, for work in parallel with the main one; InOrder: the device has one stream. The argument is
    # Streams.after_router.
    streams: Callable[..., Streams] = InOrder
    graphs: Graphs = "full"  # the mode if LoadOptions.graphs is "auto"
    captured_rows: int | None = None  # rows of the largest captured decode step; None: those of the load options
    max_graphs: int | None = None  # number of graphs that the device can store; None: no limit but memory
    layer_work: float = float("inf")  # multiplications of the device while the host launches the kernels of one layer
    step_work: float = float("inf")  # multiplications of the device in the time that a step may delay other rows
    # Other implementations of attention: the name in LoadOptions.attention -> a function that puts that attention into
    # the device. The function raises SettingRefused if the attention is not installed.
    attentions: Mapping[str, Callable[[Device], Device]] = field(default_factory=dict)
    # Supported values of LoadOptions.lora_backend besides "auto", and the LoRA products of each. torch_native: the
    # reference; triton: kernels over tiles of one request each; csgmv: the same kernels, over tiles that join the
    # requests of an adapter; cpp: C++ kernels over tiles that join requests; ascend: grouped products.
    lora_backends: Mapping[str, Lora] = field(default_factory=lambda: {"torch_native": Lora()})
    layout: Layout = AsPacked()
    options: frozenset[str] = frozenset()  # the options of engine.options.RARE that the device supports
    slot_memory: Callable[[Device], SlotMemory] = DeviceMemory
    meter: Meter | None = None  # None: the KV cache's share leaves enough memory for every workspace
    joins_requests: bool = True  # whether a tile of the LoRA products may have tokens of several requests
    captures_attention: bool = True  # False: attention runs code on the host, so a whole step cannot be captured
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built
    step_seconds: float = 0.0  # seconds after which a step counts as hung; 0: no limit

    def send(self, array: NDArray[Any]) -> Tensor:
        """A copy of the array on the device. The host does not wait for the work in the device's stream."""
        plain = torch.from_numpy(np.ascontiguousarray(array))
        return plain.pin_memory().to(self.type, non_blocking=True) if self.pinned else plain.to(self.type)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in main memory. It is complete after an event that is recorded after this call."""
        return tensor.to("cpu", non_blocking=self.pinned, copy=True)

    def event(self) -> torch.Event:
        """An event of the device's stream: `record` marks a point in the stream, `synchronize` waits for that point."""
        event: torch.Event = self.module.Event()
        return event
