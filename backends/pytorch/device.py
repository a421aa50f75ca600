"""The differences between torch devices, as one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.options import Graphs
from ...kernels.ops import Ops
from .streams import InOrder, Streams


class Recorder(Protocol):
    """Captures work of the device and replays it on the same memory, as a whole or in pieces.

    All captures of one recorder share one memory pool. After the replay of another capture only tensors that are still
    referenced keep their values.
    """

    def session(self) -> AbstractContextManager[None]:
        """Captures begin and end within a session. Work between two captures runs on the same queue."""
        ...

    def begin(self) -> None: ...

    def end(self) -> Callable[[], None]:
        """A function that replays all work since `begin`."""
        ...

    def call(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """function(*inputs), captured or not. The function may run code that torch does not dispatch."""
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """The tensor for a replay, without a reference: later captures may use its memory."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device with its ops and limits. Code that has this record never asks which device it is."""

    name: str  # of the backend
    type: str  # of torch's devices; that of HIP is "cuda"
    module: ModuleType  # torch.cpu, torch.cuda, …; its Event marks the end of a step
    ops: Ops
    dtype: torch.dtype  # of activations when LoadOptions.dtype is "auto"
    overlap: bool = False  # a step runs while the host plans the next one
    pinned: bool = False  # copies to the device use page-locked host memory
    cache_share: float = 0.25  # fraction of the memory left after loading, for the KV cache; the rest is for others
    page_size: int = 16  # tokens per page of the KV cache
    step_tokens: int = 512  # maximum in one step: enough to fill the device, few enough for short waits
    row_tokens: int | None = 512  # per row, for the automatic size of the KV cache; None: a whole context
    fp8_cache: bool = False  # the KV cache may be float8_e4m3fn
    recorder: Callable[[], Recorder] | None = None  # None: steps cannot be captured
    streams: Callable[[], Streams] = InOrder  # a second queue beside the recorder
    graphs: Graphs = "full"  # when LoadOptions.graphs is "auto"
    layer_work: float = float("inf")  # multiplications of the device while the host launches the kernels of a layer
    # From LoadOptions.attention to the ops with that attention; raises SettingRefused where it is not installed.
    attentions: Mapping[str, Callable[[Ops], Ops]] = field(default_factory=dict)
    captures_attention: bool = True  # whether whole captured steps include attention; third-party attention may not
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built
    step_seconds: float = 0.0  # seconds after which a step counts as hung; 0: no limit

    def send(self, array: NDArray[Any]) -> Tensor:
        """A copy on the device. The host does not wait for work in the queue."""
        plain = torch.from_numpy(np.ascontiguousarray(array))
        return plain.pin_memory().to(self.type, non_blocking=True) if self.pinned else plain.to(self.type)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy in main memory, complete after an event that is recorded after this call."""
        return tensor.to("cpu", non_blocking=self.pinned, copy=True)

    def event(self) -> torch.Event:
        """A mark in the device's queue: record() now, synchronize() later."""
        event: torch.Event = self.module.Event()
        return event
