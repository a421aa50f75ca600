"""The memory of adapter slots, and the copies of adapters to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .packed import allocate

if TYPE_CHECKING:
    from .device import Device


class SlotMemory(Protocol):
    """Allocates the memory of adapter slots, and copies adapters to them."""

    def allocate(self, slots: int, values: int, dtype: torch.dtype) -> Tensor:
        """Zeros [slots, values] for adapter slots."""
        ...

    def buffer(self, values: int, dtype: torch.dtype) -> Tensor:
        """Zeros [values] in main memory, from which `copy` is fast."""
        ...

    def copy(self, slot: Tensor, buffer: Tensor) -> None:
        """Copy a buffer to a slot that no step reads, and wait for the end of the copy. Steps may run meanwhile."""
        ...


class MainMemory:
    """Adapter slots in main memory. A page takes no memory until it is written."""

    def __init__(self, device: Device) -> None:
        pass

    def allocate(self, slots: int, values: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(allocate(slots * values * dtype.itemsize), dtype=dtype).view(slots, values)

    def buffer(self, values: int, dtype: torch.dtype) -> Tensor:
        return self.allocate(1, values, dtype)[0]

    def copy(self, slot: Tensor, buffer: Tensor) -> None:
        slot.copy_(buffer)


class DeviceMemory:
    """Adapter slots in the memory of a device. Adapters are copied on a stream of their own, beside the steps.

    A stream that runs only copies costs the steps nothing. No kernel may run on it: see SideStream for its cost.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Any = None  # created at the first copy

    def allocate(self, slots: int, values: int, dtype: torch.dtype) -> Tensor:
        pool = torch.zeros(slots, values, dtype=dtype, device=self._device.type)
        self._wait()
        return pool

    def buffer(self, values: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(values, dtype=dtype, pin_memory=self._device.pinned)

    def copy(self, slot: Tensor, buffer: Tensor) -> None:
        module = self._device.module
        if self._stream is None:
            self._stream = module.Stream()
        with module.stream(self._stream):
            slot.copy_(buffer, non_blocking=True)
            self._wait()

    def _wait(self) -> None:
        """Wait for the work in the current stream."""
        event = self._device.event()
        event.record()
        event.synchronize()
