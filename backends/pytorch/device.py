"""What differs between the torch devices, as one record."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from ...kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device and what it computes with. Code that is handed one never asks which it is."""

    name: str  # torch's device type
    module: ModuleType  # torch.cpu, torch.cuda, …: its Event marks the end of a step
    ops: Ops
    dtype: torch.dtype  # what Budget.dtype "auto" means here, for the model at hand
    overlap: bool = False  # a step runs beside the host, so planning ahead gains time
    pinned: bool = False  # copies to it want page-locked host memory

    def event(self) -> torch.Event:
        """A mark in the device's queue: record() now, synchronize() later."""
        event: torch.Event = self.module.Event()
        return event
