"""Opening a model on CPU and CUDA devices, before its weights are loaded. Needs no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.backends import cpu, machine
from localllm.backends.cpu import device as on_cpu
from localllm.backends.cuda import device as on_cuda
from localllm.backends.cuda import ops as cuda_ops
from localllm.backends.cuda.driver import DriverFailed
from localllm.backends.pytorch import opening
from localllm.backends.pytorch.choice import lora_backends
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.gpu import memory
from localllm.backends.pytorch.memory_plan import capturable_tokens, step_tokens
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.errors import SettingRefused
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import LoadOptions
from localllm.kernels.compiled.library import LibraryMissing
from localllm.kernels.gpu.limits import GpuLimits
from localllm.kernels.gpu.properties import GpuProperties
from localllm.kernels.ops import Ops
from localllm.kernels.ops.activation import Activation
from localllm.kernels.ops.lora import Lora
from localllm.kernels.ops.norm import Norm
from localllm.kernels.ops.register import REFERENCES, KernelSet

from . import canary

GIB = 2**30
H200 = GpuProperties((9, 0), 132, 1.98e9)
RTX_4060 = GpuProperties((8, 9), 24, 2.46e9)
RTX_3050_LAPTOP = GpuProperties((8, 6), 16, 1.5e9)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Device, int]]:
    """The device of the opened model, and its free memory."""
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(on_cuda, "gpu_properties", lambda device: H200)
    monkeypatch.setattr(on_cuda, "open_runner", lambda files, budget, device, free: (device, free))

    def open_with(files: ModelFiles, budget: LoadOptions, free: int = 5 * GIB) -> Any:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))
        return on_cuda.open_on_cuda(files, budget)

    return open_with


def files_of(folder: Path, dtype: torch.dtype) -> ModelFiles:
    folder.mkdir()
    return read_model(canary.save(folder, dtype))


def test_gpu_uses_bfloat16_except_for_float32_models(
    opened: Callable[..., tuple[Device, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype, computes in (
        (torch.float32, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ):
        device, free = opened(files_of(tmp_path / str(dtype), dtype), LoadOptions())
        assert (device.dtype, free) == (computes, 5 * GIB)
        assert device.ops is on_cuda.DEVICE.ops
    files = files_of(tmp_path / "model", torch.bfloat16)
    assert opened(files, LoadOptions(), GIB - 1)[1] == GIB - 1
    monkeypatch.setattr(on_cuda, "MISSING", "not built")
    assert opened(files, LoadOptions())[0].warnings == ("the CUDA C++ kernels are not used (slower): not built",)
    monkeypatch.setattr(on_cuda, "MISSING", "")
    assert opened(files, LoadOptions())[0].warnings == ()
    monkeypatch.setattr(on_cuda, "triton_problem", lambda: "no compiler")
    assert opened(files, LoadOptions())[0].warnings == ("the Triton kernels are not used (slower): no compiler",)


@pytest.mark.parametrize(
    ("gpu", "captured", "step"), [(H200, 161, 2048), (RTX_4060, 9, 1024), (RTX_3050_LAPTOP, 3, 512)]
)
def test_step_sizes_follow_the_rate_of_the_gpu(
    gpu: GpuProperties,
    captured: int,
    step: int,
    opened: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A slow GPU has smaller prefill steps of an 8B model, so that they delay other rows less."""
    monkeypatch.setattr(on_cuda, "gpu_properties", lambda device: gpu)
    files = files_of(tmp_path / "model", torch.bfloat16)
    device, _ = opened(files, LoadOptions())
    eight = replace(
        files.config,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    assert capturable_tokens(eight, 2048, device) == captured
    assert step_tokens(eight, LoadOptions(), device) == step
    assert step_tokens(eight, LoadOptions(max_step_tokens=100), device) == 100


def test_self_test_uses_the_dtype_of_activations(
    opened: Callable[..., tuple[Device, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def tested(*arguments: Any) -> tuple[Ops, tuple[str, ...]]:
        calls.append(arguments)
        return Ops(), ("one is replaced",)

    monkeypatch.setattr(opening, "self_tested", tested)
    monkeypatch.setattr(on_cuda, "MISSING", "not built")
    files = files_of(tmp_path / "model", torch.bfloat16)
    device, _ = opened(files, LoadOptions(self_test_dir=tmp_path))
    assert device.ops == Ops()
    assert device.warnings == ("the CUDA C++ kernels are not used (slower): not built", "one is replaced")
    opened(files, LoadOptions(self_test_dir=tmp_path, dtype="float32"))
    assert [arguments[:5] for arguments in calls] == [
        (tuple(one.ops for one in on_cuda.KERNELS), "cuda", dtype, tmp_path, "a GPU")
        for dtype in (torch.bfloat16, torch.float32)
    ]


@pytest.mark.parametrize(
    ("rejected", "names"),
    [
        ((), ["cpp", "triton", "csgmv", "torch_native"]),
        (("cpp",), ["triton", "csgmv", "torch_native"]),
        (("cpp", "triton"), ["torch_native"]),
    ],
)
def test_lora_kernels_that_fail_the_self_test_have_no_name(
    rejected: tuple[str, ...], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named() -> KernelSet:
        return KernelSet("", replace(Ops(), lora=replace(Lora(), add=lambda *arguments: arguments)))

    kernels = (replace(named(), name="cpp"), replace(named(), name="triton"), REFERENCES)
    right = next(kernel_set for kernel_set in kernels if kernel_set.name not in rejected)
    monkeypatch.setattr(opening, "self_tested", lambda *_: (right.ops, ()))
    device = replace(on_cpu.DEVICE, kernels=kernels, lora_backends=lora_backends(kernels))
    tested = opening.with_self_test(device, LoadOptions(self_test_dir=tmp_path), "a device", ())
    assert list(tested.lora_backends) == names
    assert opening.with_self_test(device, LoadOptions(), "a device", ()) is device


def test_new_driver_compiler_or_library_repeats_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, version = tmp_path / "localllm_cuda.so", ["580.1"]

    class Driver:
        def version(self) -> str:
            return version[0]

    monkeypatch.setattr(on_cuda, "Driver", Driver)
    monkeypatch.setattr(on_cuda, "MISSING", "")
    monkeypatch.setattr(on_cuda, "find_cuda_library", lambda: library)
    library.write_bytes(b"one")
    version_lists = [tuple(on_cuda._versions())]
    library.write_bytes(b"two")
    version_lists.append(tuple(on_cuda._versions()))
    version[0] = "580.2"
    version_lists.append(tuple(on_cuda._versions()))
    monkeypatch.setattr(on_cuda, "triton_problem", lambda: "Triton is not installed")
    version_lists.append(tuple(on_cuda._versions()))
    assert version_lists[-1][1] == "no Triton"
    monkeypatch.setattr(on_cuda, "MISSING", "not built")
    version_lists.append(tuple(on_cuda._versions()))
    monkeypatch.setattr(on_cuda, "gpu_limits", lambda: GpuLimits(shared=101376))
    version_lists.append(tuple(on_cuda._versions()))
    assert len(set(version_lists)) == len(version_lists)


def test_imitated_memory_limits_the_plan_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    gib = 1 << 30
    gpu = memory.GpuMemory(torch.cuda)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * gib, 140 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 4 * gib)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    gpu.limit_allocator()
    assert fractions == [], "no limit is set"
    monkeypatch.setattr(memory, "gpu_limits", lambda: GpuLimits(memory=24 * gib))
    gpu.limit_allocator()
    assert fractions == [(4 + 24 - 10) / 140]
    assert gpu.free() == 14 * gib
    monkeypatch.setattr(memory, "gpu_limits", lambda: GpuLimits(memory=6 * gib))
    with pytest.raises(SettingRefused, match=r"_MEMORY limits the GPU to 6144 MiB, but other programs use 6144 MiB"):
        gpu.limit_allocator()


def test_library_without_code_for_the_gpu_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without code for the GPU would fail at their first launch. On a machine without a GPU the library's ops
    are listed."""
    library = tmp_path / "localllm_cuda.so"
    library.write_bytes(b"localllm CUDA architectures: 90a-real\0")
    monkeypatch.setattr(cuda_ops, "find_cuda_library", lambda: library)
    driver = SimpleNamespace(first=lambda: None, capability=lambda: (8, 6))
    monkeypatch.setattr(cuda_ops, "Driver", lambda: driver)
    with pytest.raises(LibraryMissing, match=r"kernels for compute capability 9\.0a, and this GPU has 8\.6"):
        cuda_ops._with_library(Ops())
    driver.capability = lambda: (9, 0)
    cuda_ops._require_code_for_gpu()

    def no_driver() -> None:
        raise DriverFailed("no driver")

    monkeypatch.setattr(cuda_ops, "Driver", no_driver)
    cuda_ops._require_code_for_gpu()


def test_cuda_candidates_end_with_references(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_library(ops: Ops) -> Ops:
        return replace(ops, norm=Norm(rms=canary.save))

    def without_library(ops: Ops) -> Ops:
        raise LibraryMissing("not built")

    triton_ops = pytest.importorskip("localllm.kernels.triton.ops")
    triton = replace(Ops(), activation=Activation(silu_and_mul=canary.save))
    monkeypatch.setattr(triton_ops, "with_triton", lambda ops: triton)
    for problem, library, candidates in (
        ("no compiler", without_library, (Ops(),)),
        ("no compiler", with_library, (with_library(Ops()), Ops())),
        ("", without_library, (triton, Ops())),
        ("", with_library, (with_library(triton), triton, Ops())),
    ):
        monkeypatch.setattr(cuda_ops, "triton_problem", lambda result=problem: result)
        monkeypatch.setattr(cuda_ops, "_with_library", library)
        kernels, missing = cuda_ops._kernels()
        assert tuple(one.ops for one in kernels) == candidates
        assert missing == ("not built" if library is without_library else "")
        assert [one.name for one in kernels] == [
            *(["cpp"] if library is with_library else []),
            *([] if problem else ["triton"]),
            "reference",
        ]


@pytest.mark.parametrize(("missing", "references"), [(True, False), (False, True), (False, False)])
def test_cpu_uses_the_requested_threads(
    missing: bool, references: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has one thread if the kernels are built: two thread pools would compete for the cores."""
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(on_cpu, "MISSING", "not built" if missing else "")
    monkeypatch.setattr(on_cpu, "cores", lambda: 6)
    if not missing:
        monkeypatch.setattr(on_cpu, "_use_threads", lambda count: count or 6)
    monkeypatch.setattr(on_cpu, "open_runner", lambda files, budget, device, free: free)
    budget = LoadOptions(ops=("norm=reference",) if references else ())
    files = files_of(tmp_path / "model", torch.float32)
    assert on_cpu.open_on_cpu(files, replace(budget, threads=3), 77) == 77
    on_cpu.open_on_cpu(files, budget, 77)
    assert set_to == ([3, 6] if missing or references else [3, 1, 6, 1])


def test_cpu_gets_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(cpu, "memory", lambda: (100, 60))
    monkeypatch.setattr(on_cpu, "open_on_cpu", lambda files, budget, free: free)
    files: Any = None
    assert cpu.open(files, LoadOptions()) == 60  # type: ignore[comparison-overlap]
    assert os.environ.pop("GOMP_SPINCOUNT") == machine.SPIN
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    cpu.open(files, LoadOptions())
    assert "GOMP_SPINCOUNT" not in os.environ


def test_device_has_a_type_and_a_name(tmp_path: Path) -> None:
    """HIP's devices are torch's "cuda"; here they are torch's "cpu"."""
    canary.save(tmp_path)
    hip = replace(on_cpu.DEVICE, name="hip")
    options = LoadOptions(cache_bytes=2**22, max_rows=2)
    runner = open_runner(read_model(tmp_path), options, hip, 2**30)
    assert isinstance(runner, TorchRunner)
    assert runner.kv.keys.device.type == "cpu"
    assert runner.spec.groups[0].page_size == hip.page_size == 16
    wider = open_runner(read_model(tmp_path), options, replace(hip, page_size=64), 2**30)
    assert wider.spec.groups[0].page_size == 64
    with pytest.raises(SettingRefused, match="is not supported on hip"):
        open_runner(read_model(tmp_path), replace(options, attention="flashinfer"), hip, 2**30)
