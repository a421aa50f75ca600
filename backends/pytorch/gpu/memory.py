"""The memory of a GPU or NPU, with the limit of gpu_limits."""

from __future__ import annotations

from types import ModuleType

from ....engine.errors import SettingRefused
from ....kernels.gpu.limits import PREFIX, gpu_limits
from ..device import Meter


class GpuMemory:
    """The memory of the current device of `module`, a torch module: torch.cuda (also for HIP), torch.xpu, torch.npu."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def free(self) -> int:
        """Bytes that this process can still allocate."""
        return self._free_and_total()[0]

    def total(self) -> int:
        return self._free_and_total()[1]

    def meter(self, libraries: int, graph: int) -> Meter:
        """`libraries`, `graph`: see Meter."""
        return Meter(self.free, self.release, libraries, graph)

    def release(self) -> None:
        """Return the unused memory of torch's allocator to the device."""
        self._module.synchronize()
        self._module.empty_cache()

    def limit_allocator(self) -> None:
        """Make torch run out of memory at the limit of gpu_limits, if there is one. Raises SettingRefused if other
        programs use more memory of the GPU than the limit: an imitated GPU of this size would have no memory."""
        limits = gpu_limits()
        if limits.memory is None:
            return
        self._module.init()
        free, total = self._module.mem_get_info()
        reserved = self._module.memory_reserved()
        others = total - free - reserved
        if others >= limits.memory:
            sizes = f"{limits.memory >> 20} MiB, but other programs use {others >> 20} MiB"
            raise SettingRefused(
                f"{PREFIX}MEMORY limits the GPU to {sizes}", "end the other programs, or set a larger limit"
            )
        limited, _ = limits.limit_memory(free, total)
        self._module.set_per_process_memory_fraction((reserved + limited) / total)

    def _free_and_total(self) -> tuple[int, int]:
        return gpu_limits().limit_memory(*self._module.mem_get_info())
