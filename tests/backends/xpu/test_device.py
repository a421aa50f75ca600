"""The device record of Intel GPUs: memory, dtype, graphs, and the choice of ops at a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.backends import platforms
from localllm.backends.pytorch.failures import is_shortage
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.memory_plan import chosen_graphs
from localllm.backends.pytorch.runner import TorchRunner
from localllm.backends.xpu import device as xpu_device
from localllm.backends.xpu import memory
from localllm.engine.errors import SettingRefused
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import LoadOptions
from localllm.kernels.ops.register import KernelSet

from .. import canary
from ..conformance import BUDGET
from .stand_ins import XPU

GIB = 2**30


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return read_model(canary.save(tmp_path, torch.bfloat16))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torch.xpu with a GPU of 16 GiB; the test changes its values."""
    values: dict[str, Any] = {"total": 16 * GIB, "free": 15 * GIB, "reserved": 0, "bf16": True}

    def mem_get_info() -> tuple[int, int]:
        if values["free"] is None:
            raise RuntimeError("The device doesn't support querying the available free memory.")
        return values["free"], values["total"]

    stand_ins: Mapping[str, Any] = {
        "mem_get_info": mem_get_info,
        "get_device_properties": lambda: SimpleNamespace(total_memory=values["total"], driver_version="1.6"),
        "memory_reserved": lambda: values["reserved"],
        "is_bf16_supported": lambda: values["bf16"],
        "get_device_name": lambda: "Intel(R) Arc(TM) B580 Graphics",
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.xpu, name, stand_in)
    return values


def test_free_memory_leaves_scratch_memory_to_onednn(gpu: dict[str, Any]) -> None:
    assert memory.MEMORY.free() == 13 * GIB
    gpu["total"] = gpu["free"] = 8 * GIB
    assert memory.MEMORY.free() == 7 * GIB, "an eighth of a small memory"
    gpu["free"] = GIB // 2
    assert memory.MEMORY.free() == 0


def test_free_memory_counts_what_torch_reserved(gpu: dict[str, Any]) -> None:
    """The driver's count may be that of an earlier time."""
    gpu |= {"free": 16 * GIB, "reserved": 10 * GIB}
    assert memory.MEMORY.free() == 4 * GIB


def test_integrated_graphics_use_the_free_main_memory(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu["free"] = None
    monkeypatch.setattr(memory, "main_memory", lambda: (32 * GIB, 5 * GIB))
    assert memory.MEMORY.free() == 3 * GIB


def test_dtype_follows_the_weights_and_the_gpu(files: ModelFiles, tmp_path: Path, gpu: dict[str, Any]) -> None:
    (tmp_path / "wide").mkdir()
    wide = read_model(canary.save(tmp_path / "wide"))
    assert xpu_device.device_for(files, LoadOptions()).dtype == torch.bfloat16
    assert xpu_device.device_for(wide, LoadOptions()).dtype == torch.float32
    gpu["bf16"] = False
    assert xpu_device.device_for(files, LoadOptions()).dtype == torch.float32


def test_graphs_are_off_by_default_and_full_on_request(files: ModelFiles, gpu: dict[str, Any]) -> None:
    assert chosen_graphs(LoadOptions(), xpu_device.device_for(files, LoadOptions())) == "off"
    full = replace(LoadOptions(), graphs="full")
    assert chosen_graphs(full, xpu_device.device_for(files, full)) == "full"
    for graphs in ("breakable", "split"):
        with pytest.raises(SettingRefused, match=f"graphs {graphs} is not supported by xpu") as caught:
            xpu_device.device_for(files, replace(LoadOptions(), graphs=graphs))
        assert caught.value.setting == "graphs"


def test_a_kernel_that_fails_its_self_test_gives_way(
    files: ModelFiles, gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load with everything but the GPU. Attention is wrong here, as it was on Arc Pro B70."""

    def garbage(query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    broken = KernelSet("broken", replace(XPU.ops, attention=replace(XPU.ops.attention, paged=garbage)))
    kernels = broken, *XPU.kernels
    monkeypatch.setattr(xpu_device, "DEVICE", replace(XPU, ops=broken.ops, kernels=kernels))
    options = replace(BUDGET, self_test_dir=tmp_path / "verdicts")
    runner = xpu_device.open_on_xpu(files, options)
    assert isinstance(runner, TorchRunner)
    assert runner.device.ops.attention.paged is XPU.ops.attention.paged
    assert runner.device.ops.linear.int4 is XPU.ops.linear.int4
    warnings = "\n".join(runner.spec.warnings)
    assert "attention.paged: onednn.attention.paged_attention instead of" in warnings
    assert "the Triton kernels are not used (slower)" in warnings
    with_graphs = xpu_device.open_on_xpu(files, replace(options, graphs="full"))
    assert isinstance(with_graphs, GraphRunner)
    plan = xpu_device.plan_on_xpu(files, BUDGET)
    assert plan.free == 13 * GIB


def test_shortage_of_level_zero_is_out_of_memory() -> None:
    message = "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
    assert is_shortage(RuntimeError(message))
    assert not is_shortage(RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"))


def test_selftest_reports_the_ops_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localllm selftest --backend xpu`: the ops that are no references, then products with the widths of models."""
    monkeypatch.setitem(platforms.DEVICES, "xpu", "cpu")
    monkeypatch.setattr(platforms, "platforms", lambda: {"xpu": XPU.ops})
    results = list(islice(platforms.device_checks("xpu", "bfloat16"), 4))
    assert [result.title for result in results[:3]] == [
        "linear.int4 (onednn.linear.int4)",
        "linear.int4_wide (onednn.linear.int4_wide)",
        "attention.paged (onednn.attention.paged_attention)",
    ]
    assert results[3].title.startswith("linear.dense ")
    assert not any(result.defect for result in results)
