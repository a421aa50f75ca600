"""A driver of Triton for NVIDIA GPUs that needs no C compiler: it calls NVIDIA's driver with ctypes.

Triton's driver compiles C code with the headers of Python at run time. The class here has the same interface, so Triton
loads and launches kernels through it. A launch takes some microseconds more of the host. It has no clusters, no
cooperative launches, no tensor descriptors and no kernels that overlap: target.py chooses kernels without them.
problem.py names the versions of Triton that have this interface.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

import triton
from triton.backends.driver import GPUDriver
from triton.backends.nvidia.driver import CudaDriver

STATIC_LIMIT = 48 << 10  # bytes of shared memory that a kernel may use without cuFuncSetAttribute
_FORMATS = {  # type of a kernel's argument -> format of struct
    "i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "I", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
# CU_DEVICE_ATTRIBUTE_…
_PROPERTIES = {
    "max_shared_mem": 97,
    "max_num_regs": 12,
    "multiprocessor_count": 16,
    "warpSize": 10,
    "sm_clock_rate": 13,
    "mem_clock_rate": 36,
    "mem_bus_width": 37,
}
# CU_FUNC_ATTRIBUTE_…
_MAX_THREADS, _STATIC_SHARED, _LOCAL_BYTES, _REGISTERS, _DYNAMIC_SHARED = 0, 1, 3, 4, 8


class LaunchFailed(RuntimeError):
    """A call of NVIDIA's driver failed. The message has the name of its error."""


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernel.argtypes = [
        ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    ]  # fmt: skip
    return library


def _check(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(name))
        raise LaunchFailed(f"Triton Error [CUDA]: {(name.value or b'unknown error').decode()}")


class _Utils:
    """Loads compiled kernels, and queries devices."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The properties of a device that Triton and `target.py` read. Raises LaunchFailed."""
        _check(_library().cuInit(0))
        handle = _device(device)
        return {name: _attribute(number, handle) for name, number in _PROPERTIES.items()}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spilled registers, largest number of threads of a block) of a kernel."""
        cuda = _library()
        _make_context_current(device)
        module = ctypes.c_void_p()
        function = ctypes.c_void_p()
        _check(cuda.cuModuleLoadData(ctypes.byref(module), kernel))
        _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        limit = _attribute(_PROPERTIES["max_shared_mem"], _device(device))
        if shared > STATIC_LIMIT and limit > STATIC_LIMIT:
            available = limit - _function_attribute(_STATIC_SHARED, function)
            _check(cuda.cuFuncSetAttribute(function, _DYNAMIC_SHARED, available))
        numbers = [_function_attribute(number, function) for number in (_REGISTERS, _LOCAL_BYTES, _MAX_THREADS)]
        return module.value or 0, function.value or 0, numbers[0], numbers[1] // 4, numbers[2]


class _Launcher:
    """Launches one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        features = metadata.launch_cooperative_grid, metadata.launch_pdl, metadata.num_ctas != 1
        scratch = metadata.global_scratch_size, metadata.profile_scratch_size
        if any(features) or any(scratch):
            raise NotImplementedError("Triton without a C compiler has no clusters and no scratch memory")
        self._warps: int = metadata.num_warps
        self._shared: int = metadata.shared
        types = [kind for kind in source.signature.values() if kind != "constexpr"]
        self._used = [index for index, kind in enumerate(source.signature.values()) if kind != "constexpr"]
        self._pointers = [kind[0] == "*" for kind in types]
        self._bfloat16 = [kind == "bf16" for kind in types]
        # Each argument has 8 bytes; the last two are the addresses of scratch memory, which is not used.
        self._layout = struct.Struct("<" + "".join(map(_slot, types)) + "QQ")
        self._storage = ctypes.c_char * self._layout.size
        self._parameters = ctypes.c_void_p * (self._layout.size // 8)

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, launch_metadata: Any, enter: Any,
        leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel with x * y * z programs. `enter` and `leave`: hooks, or None. Raises LaunchFailed."""
        if enter is not None:
            enter(launch_metadata)
        if x * y * z > 0:
            self._launch((x, y, z), stream, function, arguments)
        if leave is not None:
            leave(launch_metadata)

    def _launch(self, grid: tuple[int, int, int], stream: int, function: int, arguments: tuple[Any, ...]) -> None:
        _make_context_current(0)
        storage = self._storage()
        values = map(_value, (arguments[index] for index in self._used), self._pointers, self._bfloat16)
        self._layout.pack_into(storage, 0, *values, 0, 0)
        start = ctypes.addressof(storage)
        parameters = self._parameters(*range(start, start + self._layout.size, 8))
        block = 32 * self._warps, 1, 1
        _check(_library().cuLaunchKernel(function, *grid, *block, self._shared, stream, parameters, None))


class CompilerFreeDriver(CudaDriver):  # type: ignore[misc]  # Triton has no types
    """Triton's driver with the launcher of this file."""

    plain_launches = True  # target.py: kernels neither overlap nor receive tensor descriptors

    def __init__(self) -> None:
        self.utils = _Utils()
        self.launcher_cls = _Launcher
        GPUDriver.__init__(self)  # not CudaDriver's, which compiles


def activate() -> None:
    """Make Triton use this driver, if torch has an NVIDIA GPU."""
    if CudaDriver.is_active():
        triton.runtime.driver.set_active(CompilerFreeDriver())


def _slot(kind: str) -> str:
    """The format of struct for an argument of a type, padded to 8 bytes."""
    code = "Q" if kind[0] == "*" else "H" if kind == "bf16" else _FORMATS.get(kind)
    if code is None:
        raise NotImplementedError(f"Triton without a C compiler passes no argument of type {kind}")
    return f"{code}{8 - struct.calcsize(code)}x"


def _value(argument: Any, pointer: bool, bfloat16: bool) -> Any:
    """The number that is packed for an argument: the address of a tensor, or the bits of a bfloat16."""
    if pointer:
        return argument.data_ptr() if hasattr(argument, "data_ptr") else argument or 0
    if bfloat16:
        return struct.unpack("<I", struct.pack("<f", argument))[0] >> 16
    return argument


def _device(index: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _check(_library().cuDeviceGet(ctypes.byref(handle), index))
    return handle


def _attribute(number: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check(_library().cuDeviceGetAttribute(ctypes.byref(value), number, device))
    return value.value


def _function_attribute(number: int, function: ctypes.c_void_p) -> int:
    value = ctypes.c_int()
    _check(_library().cuFuncGetAttribute(ctypes.byref(value), number, function))
    return value.value


def _make_context_current(device: int) -> None:
    """A thread that has not called the CUDA runtime has no context: make the context of `device` current."""
    cuda = _library()
    context = ctypes.c_void_p()
    _check(cuda.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), _device(device)))
        _check(cuda.cuCtxSetCurrent(context))
