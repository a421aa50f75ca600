"""The device record of AMD GPUs: memory, dtype, and the choice of ops at a load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.backends.hip import device as hip_device
from localllm.backends.hip import memory
from localllm.backends.hip.gpus import Gpu, Version
from localllm.backends.pytorch.failures import is_shortage
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.kernels.ops import Ops
from localllm.kernels.ops.register import REFERENCES, KernelSet

from .. import canary
from ..conformance import BUDGET
from ..other_device import on_cpu

GIB = 2**30
RX_7900 = Gpu(Version(11, 0, 0), "", "", "renderD128", 96, 2.5e9, 24 * GIB, 23 * GIB)
STRIX_HALO = Gpu(Version(11, 5, 1), "", "", "renderD128", 40, 2.9e9, 62 * GIB, 48 * GIB, True, GIB // 2)


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return read_model(canary.save(tmp_path, torch.bfloat16))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda with the GPU `card.gpu`; the main memory has 10 GiB free."""
    card = SimpleNamespace(gpu=RX_7900)
    monkeypatch.setattr(hip_device, "visible", lambda: [card.gpu])
    monkeypatch.setattr(hip_device, "triton_problem", lambda: "no compiler")
    monkeypatch.setattr(memory, "main_memory", lambda: (64 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (card.gpu.free, card.gpu.memory))
    return card


def test_dtype_and_work_follow_the_model_and_the_gpu(files: ModelFiles, tmp_path: Path, card: SimpleNamespace) -> None:
    device = hip_device.device_for(files, RX_7900)
    assert (device.dtype, device.capability) == (torch.bfloat16, (11, 0, 0))
    assert device.step_work == pytest.approx(0.25 * 256 * 96 * 2.5e9)
    assert device.warnings == ("the Triton kernels are not used (slower): no compiler",)
    (tmp_path / "wide").mkdir()
    assert hip_device.device_for(read_model(canary.save(tmp_path / "wide")), RX_7900).dtype == torch.float32
    unknown = hip_device.device_for(files, replace(RX_7900, clock=0.0))
    assert unknown.step_work == float("inf"), "the driver gives no clock: no limit"


def test_integrated_gpu_leaves_main_memory_to_other_programs(files: ModelFiles, card: SimpleNamespace) -> None:
    own = hip_device.plan_on_hip(files, BUDGET).free
    card.gpu = STRIX_HALO
    shared = hip_device.plan_on_hip(files, BUDGET).free
    assert (own, shared) == (23 * GIB, 10 * GIB)
    device = hip_device.device_for(files, STRIX_HALO)
    assert device.cache_share < hip_device.DEVICE.cache_share
    assert device.meter is not None
    assert device.meter.free() == 10 * GIB


def test_kernel_that_fails_its_self_test_gives_way(
    files: ModelFiles, tmp_path: Path, card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load with everything but the GPU."""

    def garbage(query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    broken = KernelSet("broken", replace(Ops(), attention=replace(Ops().attention, paged=garbage)))
    monkeypatch.setattr(hip_device, "DEVICE", on_cpu(hip_device.DEVICE, (broken, REFERENCES)))
    runner: Any = hip_device.open_on_hip(files, replace(BUDGET, self_test_dir=tmp_path / "verdicts", graphs="off"))
    assert runner.device.ops.attention.paged is Ops().attention.paged
    assert "attention.paged: reference instead of" in "\n".join(runner.spec.warnings)


def test_verdicts_depend_on_rocm_the_driver_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [tuple(hip_device._versions())]
    monkeypatch.setattr(hip_device, "rocm", lambda: "7.2")
    versions.append(tuple(hip_device._versions()))
    monkeypatch.setattr("platform.release", lambda: "7.0")
    versions.append(tuple(hip_device._versions()))
    monkeypatch.setattr(hip_device, "triton_problem", lambda: "no compiler")
    versions.append(tuple(hip_device._versions()))
    assert len(set(versions)) == 4


def test_shortage_of_hip_is_out_of_memory() -> None:
    for message in ("HIP error: out of memory", "HIPBLAS_STATUS_ALLOC_FAILED", "hipErrorOutOfMemory (2)"):
        assert is_shortage(RuntimeError(message))
    assert is_shortage(RuntimeError("rocBLAS error: rocblas_status_memory_error"))
    assert not is_shortage(RuntimeError("HIP error: invalid device function"))
