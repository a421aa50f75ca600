"""The driver of Triton that needs no C compiler, with a stand-in of NVIDIA's driver. On a GPU, the other tests of
Triton run it if PATH has no compiler."""

from __future__ import annotations

import ctypes
import math
import struct
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
from localllm.kernels.triton.nvidia import driver

SHARED_LIMIT = 101376


class FakeCuda:
    """The calls of libcuda that the driver makes. It notes the launches: (function, grid, threads, shared, stream,
    bytes of the parameters)."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.dynamic_shared = 0
        self.context = 77
        self.status = 0
        self.parameters = 0  # number of parameters of the next kernel

    def cuInit(self, flags: int) -> int:
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.context
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 78
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context = context.value
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:
        value._obj.value = {97: SHARED_LIMIT, 16: 46, 10: 32}.get(number, number)
        return 0

    def cuModuleLoadData(self, module: Any, kernel: bytes) -> int:
        assert kernel == b"cubin\0code"
        module._obj.value = 11
        return self.status

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        assert (module.value, name) == (11, b"add")
        function._obj.value = 12
        return 0

    def cuFuncGetAttribute(self, value: Any, number: int, function: Any) -> int:
        value._obj.value = {0: 1024, 1: 100, 3: 16, 4: 40}[number]
        return 0

    def cuFuncSetAttribute(self, function: Any, number: int, value: int) -> int:
        assert (function.value, number) == (12, 8)
        self.dynamic_shared = value
        return 0

    def cuLaunchKernel(self, function: int, *sizes: Any) -> int:
        *sizes, stream, parameters, extra = sizes
        assert extra is None
        data = [ctypes.string_at(parameters[index], 8) for index in range(self.parameters)]
        self.launches.append((function, tuple(sizes), stream, data))
        return self.status

    def cuGetErrorString(self, status: int, name: Any) -> int:
        name._obj.value = b"out of memory"
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(driver, "_library", lambda: fake)
    return fake


def launcher(cuda: FakeCuda, *types: str, **metadata: Any) -> Any:
    cuda.parameters = len([kind for kind in types if kind != "constexpr"]) + 2
    defaults = {"num_warps": 4, "num_ctas": 1, "shared": 2048, "launch_cooperative_grid": False, "launch_pdl": False}
    scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
    source = SimpleNamespace(signature=dict(enumerate(types)))
    return driver._Launcher(source, SimpleNamespace(**defaults | scratch | metadata))


def test_arguments_are_packed_by_type(cuda: FakeCuda) -> None:
    tensor = SimpleNamespace(data_ptr=lambda: 2**40)
    types = ("*bf16", "*fp32", "*i8", "constexpr", "i1", "i8", "i32", "i64", "u8", "u32", "u64", "fp32", "fp64")
    values = (tensor, None, 99, "block", True, -1, -(2**31), -(2**63), 255, 2**32 - 1, 2**64 - 1, 0.5, math.pi)
    launcher(cuda, *types)(3, 2, 1, 55, 12, (4, 1, 2048), None, None, None, *values)
    ((function, sizes, stream, data),) = cuda.launches
    assert (function, sizes, stream) == (12, (3, 2, 1, 128, 1, 1, 2048), 55)
    expected = struct.pack("<QQQ", 2**40, 0, 99) + struct.pack("<i4xb7xi4xq", 1, -1, -(2**31), -(2**63))
    expected += struct.pack("<B7xI4xQ", 255, 2**32 - 1, 2**64 - 1) + struct.pack("<f4xd", 0.5, math.pi)
    assert b"".join(data) == expected + bytes(16), "the last two are the addresses of no scratch memory"


def test_16_bit_floats_are_rounded(cuda: FakeCuda) -> None:
    launcher(cuda, "fp16", "bf16")(1, 1, 1, 0, 12, (), None, None, None, 1.5, -2.0)
    assert cuda.launches[0][3][:2] == [struct.pack("<H6x", 0x3E00), struct.pack("<H6x", 0xC000)]


def test_hooks_run_and_an_empty_grid_launches_nothing(cuda: FakeCuda) -> None:
    notes: list[Any] = []
    launcher(cuda)(0, 1, 1, 0, 12, (), "facts", notes.append, notes.append)
    assert (notes, cuda.launches) == (["facts", "facts"], [])


@pytest.mark.parametrize(
    "metadata", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"launch_pdl": True}, {"global_scratch_size": 8}]
)
def test_unsupported_kernels_are_refused(cuda: FakeCuda, metadata: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError):
        launcher(cuda, **metadata)


def test_unsupported_arguments_are_refused(cuda: FakeCuda) -> None:
    with pytest.raises(NotImplementedError, match="passes no argument of type nvTmaDesc"):
        launcher(cuda, "nvTmaDesc")


@pytest.mark.parametrize(("shared", "dynamic"), [(48 << 10, 0), (60_000, SHARED_LIMIT - 100)])
def test_kernel_is_loaded(cuda: FakeCuda, shared: int, dynamic: int) -> None:
    cuda.context = 0  # of a new thread
    utils = driver._Utils()
    assert utils.load_binary("add", b"cubin\0code", shared, 0) == (11, 12, 40, 4, 1024)
    assert (cuda.dynamic_shared, cuda.context) == (dynamic, 78)
    properties = utils.get_device_properties(0)
    assert (properties["max_shared_mem"], properties["multiprocessor_count"]) == (SHARED_LIMIT, 46)


def test_errors_have_the_name_of_the_driver(cuda: FakeCuda) -> None:
    cuda.status = 2
    with pytest.raises(driver.LaunchFailed, match=r"Triton Error \[CUDA\]: out of memory"):
        driver._Utils().load_binary("add", b"cubin\0code", 0, 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        launcher(cuda)(1, 1, 1, 0, 12, (), None, None, None)
