"""A second stream of a torch device, for work that may run in parallel with the main stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any


@cache
def _side_stream(module: ModuleType, device: int) -> Any:
    """The second stream of a device. There is only one, because libraries and kernels allocate memory for every stream
    that they run on."""
    return module.Stream(device)


class SideStream:
    """Streams (kernels/ops/streams.py) of a device whose torch module has streams: torch.cuda (also for HIP),
    torch.xpu, torch.npu.

    After work on other streams, the kernels of all graphs of a process may start later (docs/benchmarks.md). So a
    second stream must gain more time than that, and runs in graphs only.
    """

    def __init__(self, module: ModuleType, after_router: bool = False) -> None:
        self.after_router = after_router
        self._module = module
        self._side = _side_stream(module, module.current_device())

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._side.wait_stream(self._module.current_stream())
        with self._module.stream(self._side):
            yield

    def join(self) -> None:
        self._module.current_stream().wait_stream(self._side)
