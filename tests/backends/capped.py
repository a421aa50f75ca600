"""A device with little memory, on the CPU: a dispatch mode counts the bytes of all tensors that ops of torch allocate.

Weights that stay mapped files are not counted. With the device "meta", tensors take no memory at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localllm.backends.pytorch.device import Meter


class CappedMemory(TorchDispatchMode):
    """Memory of `limit` bytes. An op that allocates more raises torch.OutOfMemoryError. Like an allocator of torch, it
    keeps freed memory until `release`."""

    def __init__(self, limit: int, device: str = "cpu") -> None:
        super().__init__()
        self.limit = limit
        self._device = device
        self.peak = 0
        self._reserved = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}  # address of a storage -> its reference and bytes
        self.meter = Meter(self.free, self.release, libraries=0, graph=0)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.device.type == self._device and _storage(one) not in inputs:
                storage = one.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.live() > self.limit:
            raise torch.OutOfMemoryError(f"out of memory: {self.live()} of {self.limit} bytes")
        return result

    def live(self) -> int:
        """Bytes of the tensors that exist now."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        live = sum(size for _, size in self._live.values())
        self._reserved = max(self._reserved, live)
        self.peak = max(self.peak, live)
        return live

    def free(self) -> int:
        self.live()
        return self.limit - self._reserved

    def release(self) -> None:
        self._reserved = 0
        self._reserved = self.live()


def _storage(tensor: Tensor) -> int:
    """The identity of a tensor's storage, which views share."""
    address: int = tensor.untyped_storage()._cdata
    return address
