"""The variables that imitate a smaller GPU, and that all queries of GPU properties apply them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.kernels.gpu.limits import VARIABLES, GpuLimits, LimitRefused, gpu_limits, read_limits

ROOT = Path(__file__).resolve().parents[2]
# Functions and attributes that return a property of a GPU, and the only files that may use them.
QUERY = re.compile(
    r"get_device_properties|get_device_capability|mem_get_info|DeviceGetAttribute|cudaGetDeviceProperties"
    r"|cudaMemGetInfo|multi_processor_count|shared_memory_per"
)
QUERYING = {
    "backends/pytorch/gpu/memory.py",
    "backends/cuda/driver.py",
    "backends/xpu/memory.py",
    "kernels/cuda/device/gpu.h",
    "kernels/gpu/properties.py",
    "kernels/triton/target.py",
    "kernels/triton/nvidia/driver.py",
    "scripts/hardware.py",
}
# kernels/triton/target.py limits the numbers of kernels/triton/nvidia/driver.py; scripts/hardware.py has a stand-in.
UNLIMITED = {"kernels/cuda/device/gpu.h", "kernels/triton/nvidia/driver.py", "scripts/hardware.py"}


def test_only_files_that_apply_the_limits_query_a_gpu() -> None:
    found = set()
    for folder in ("app", "backends", "engine", "kernels", "scripts"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".py", ".cu", ".cuh", ".h", ".cpp"} and QUERY.search(file.read_text("utf-8")):
                found.add(str(file.relative_to(ROOT)))
    assert found == QUERYING
    for name in found - UNLIMITED:
        assert "gpu_limits()" in (ROOT / name).read_text("utf-8"), name


def test_limits_are_read_from_the_variables() -> None:
    values = dict(zip(VARIABLES, ("8.6", "101376", "28", "8GiB"), strict=True))
    assert read_limits(values) == GpuLimits((8, 6), 101376, 28, 8 << 30)
    assert read_limits({}) == read_limits(dict.fromkeys(VARIABLES, "")) == GpuLimits()
    assert read_limits({VARIABLES[3]: "7900MiB"}).memory == 7900 << 20
    assert read_limits({VARIABLES[3]: "123"}).memory == 123


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CAPABILITY", "8"),
        ("CAPABILITY", "sm_86"),
        ("CAPABILITY", "8.61"),
        ("SHARED", "99KB"),
        ("SHARED", "0"),
        ("SHARED", "1024"),
        ("PROCESSORS", "-1"),
        ("PROCESSORS", "0"),
        ("PROCESSORS", "1.5"),
        ("MEMORY", "8 GiB"),
        ("MEMORY", "8GB"),
        ("MEMORY", "0GiB"),
        ("MEMORY", "0.5GiB"),
    ],
)
def test_invalid_values_are_refused_by_name(variable: str, value: str) -> None:
    name = f"LOCALLLM_DEV_CUDA_{variable}"
    with pytest.raises(LimitRefused, match=re.escape(f"{name}={value}: ")):
        read_limits({name: value})


def test_values_are_limited_and_larger_limits_are_refused() -> None:
    limits = GpuLimits((8, 6), 101376, 28, 8 << 30)
    assert limits.limit_capability((9, 0)) == (8, 6)
    assert limits.limit_shared(232448) == 101376
    assert limits.limit_processors(132) == 28
    assert limits.limit_memory(140 << 30, 141 << 30) == (7 << 30, 8 << 30)
    assert limits.limit_memory(100 << 30, 141 << 30) == (0, 8 << 30)
    assert limits.describe() == (
        f"8.6 compute capability, 101376 bytes of shared memory, 28 multiprocessors, {8 << 30} bytes of memory"
    )
    for refused in (
        lambda: limits.limit_capability((8, 0)),
        lambda: limits.limit_shared(64 << 10),
        lambda: limits.limit_processors(27),
        lambda: limits.limit_memory(1 << 30, 6 << 30),
    ):
        with pytest.raises(LimitRefused, match="imitate smaller GPUs only"):
            refused()
    none = GpuLimits()
    assert none.limit_memory(5, 6) == (5, 6)
    assert (none.limit_capability((9, 0)), none.limit_shared(7), none.limit_processors(8)) == ((9, 0), 7, 8)
    assert none.describe() == ""


class FakeDriver:
    """Triton's driver of an H200."""

    def __init__(self, backend: str, arch: Any) -> None:
        self.utils = SimpleNamespace(
            get_device_properties=lambda index: {"multiprocessor_count": 132, "max_shared_mem": 232448}
        )
        self.target = SimpleNamespace(backend=backend, arch=arch)

    def get_current_target(self) -> SimpleNamespace:
        return self.target


def with_driver(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module kernels/triton/target.py, with a driver of Triton."""
    pytest.importorskip("triton")
    from localllm.kernels.triton import target

    active = SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=driver)))
    monkeypatch.setattr(target, "triton", active)
    monkeypatch.setattr(target, "INTERPRETED", False)
    return target


@pytest.mark.parametrize(
    ("backend", "arch", "expected"),
    [("cuda", 90, (46, 101376, False)), ("hip", "gfx90a", (132, 232448, False))],
)
def test_triton_plans_for_the_imitated_gpu(
    backend: str, arch: Any, expected: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are those of an NVIDIA GPU; other GPUs keep their properties."""
    target = with_driver(FakeDriver(backend, arch), monkeypatch)
    for name, value in zip(VARIABLES, ("8.6", "101376", "46", ""), strict=True):
        monkeypatch.setenv(name, value)
    gpu_limits.cache_clear()
    try:
        device = target.device_properties.__wrapped__(torch.device("cuda"))
    finally:
        gpu_limits.cache_clear()
    assert (device.processors, device.shared, device.target.fp8 is not None) == expected


@pytest.mark.parametrize(
    ("backend", "arch", "plain", "expected"),
    [
        ("cuda", 89, False, (False, False)),
        ("cuda", 90, False, (True, True)),
        ("cuda", 90, True, (False, False)),
        ("cuda", 120, False, (True, False)),
        ("cuda", 120, True, (False, False)),
        ("hip", "gfx942", False, (False, False)),
    ],
)
def test_kernels_overlap_only_if_gpu_and_driver_support_it(
    backend: str, arch: Any, plain: bool, expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from localllm.kernels.triton.nvidia.driver import CompilerFreeDriver

    driver = FakeDriver(backend, arch)
    if plain:
        driver.plain_launches = CompilerFreeDriver.plain_launches  # type: ignore[attr-defined]
    target = with_driver(driver, monkeypatch)
    device = target.device_properties.__wrapped__(torch.device("cuda"))
    assert (device.target.overlaps, device.target.descriptors) == expected
