"""What differs between the torch devices, as one record."""

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
    """Records work of the device once, to repeat it on the same memory, in pieces if need be.

    All recordings of one recorder share the memory of what they make on the way: nothing of it may be read once another
    is replayed, but what is kept alive.
    """

    def session(self) -> AbstractContextManager[None]:
        """Recording is done within one; what is computed there between two recordings comes in the same order."""
        ...

    def begin(self) -> None: ...

    def end(self) -> Callable[[], None]:
        """What repeats all that was computed since `begin`."""
        ...

    def call(self, function: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
        """function(*given), which may compute by other means than torch's ops, within a recording or outside."""
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """The tensor for a replay, which does not keep its memory from later recordings."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device and what it computes with. Code that is handed one never asks which it is."""

    name: str  # of the backend
    type: str  # of torch's devices; that of HIP is "cuda"
    module: ModuleType  # torch.cpu, torch.cuda, …: its Event marks the end of a step
    ops: Ops
    dtype: torch.dtype  # what LoadOptions.dtype "auto" means here, for the model at hand
    overlap: bool = False  # a step runs beside the host, so planning ahead gains time
    pinned: bool = False  # copies to it want page-locked host memory
    cache_share: float = 0.25  # of the memory that is free once the weights are in; the rest is for everybody else
    page_size: int = 16  # tokens per page of the KV cache
    step_tokens: int = 512  # in one step: enough to keep it busy, few enough that others need not wait long
    row_tokens: int | None = 512  # per row the cache is sized for when nothing is asked for; None: a whole context
    fp8_cache: bool = False  # its cache may be of float8_e4m3fn
    recorder: Callable[[], Recorder] | None = None  # where steps can be captured
    streams: Callable[[], Streams] = InOrder  # a second queue beside the recorder
    graphs: Graphs = "full"  # what LoadOptions.graphs "auto" means then
    layer_work: float = float("inf")  # multiplications that it makes while the host launches a layer's kernels
    # From LoadOptions.attention to the ops with that attention; raises SettingRefused where it is not installed.
    attentions: Mapping[str, Callable[[Ops], Ops]] = field(default_factory=dict)
    records_attention: bool = True  # in steps recorded whole; another's may need the host for every step
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built
    step_seconds: float = 0.0  # a step that takes longer hangs; 0: its length tells nothing

    def send(self, array: NDArray[Any]) -> Tensor:
        """A copy on the device, without waiting for what is under way there."""
        plain = torch.from_numpy(np.ascontiguousarray(array))
        return plain.pin_memory().to(self.type, non_blocking=True) if self.pinned else plain.to(self.type)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy in main memory, there once an event recorded after this call has passed."""
        return tensor.to("cpu", non_blocking=self.pinned, copy=True)

    def event(self) -> torch.Event:
        """A mark in the device's queue: record() now, synchronize() later."""
        event: torch.Event = self.module.Event()
        return event
