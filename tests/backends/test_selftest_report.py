"""`localllm selftest` of a GPU, from the model's answers to the exit code, with the GPU's ops on the CPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.app.commands import selftest
from localllm.backends import platforms
from localllm.backends.hip import check
from localllm.backends.pytorch import product_check
from localllm.backends.pytorch.gpu import graph_check
from localllm.engine.runner import DeviceInfo
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases.linear import CASES
from localllm.kernels.ops.streams import InOrder

from .tape import Tape
from .xpu.stand_ins import XPU

pytestmark = pytest.mark.real_otherdevice

OPS = {"hip": Ops(), "xpu": XPU.ops}  # AMD's own ops are Triton's, which need a GPU
GPU = {"hip": ("graph of attention.paged", "order of two streams"), "xpu": ("linear.int4 (onednn.linear.int4)",)}


@pytest.fixture(params=["hip", "xpu"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend whose GPU is the CPU, with one product."""
    name: str = request.param
    info = SimpleNamespace(backend=name, device="GPU 9", dtype="bfloat16", quant="", warnings=("a kernel is slower",))

    async def load(_: str) -> Any:
        return info

    @asynccontextmanager
    async def client(*_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(load=load)

    async def answers(_: Any) -> AsyncIterator[selftest.Check]:
        yield selftest.Check("known answers, one by one", True, "3 answers")

    module = SimpleNamespace(
        probe=lambda: DeviceInfo(name, "GPU 9", 8, 8, {"driver": "7.1"}), read_bandwidth=lambda: 5e11
    )
    monkeypatch.setattr(selftest, "loaded_client", client)
    monkeypatch.setattr(selftest, "_checks", answers)
    monkeypatch.setattr(selftest, "load", lambda _: module)
    monkeypatch.setitem(platforms.DEVICES, name, "cpu")
    monkeypatch.setattr(platforms, "platforms", lambda: OPS)
    monkeypatch.setattr(check, "CudaRecorder", Tape)
    monkeypatch.setattr(check, "SideStream", lambda module: InOrder())
    monkeypatch.setattr(graph_check, "ROUNDS", 3)
    monkeypatch.setattr(product_check, "REAL_CASES", [case for case in CASES if str(case) == "linear.dense-33-rows"])
    monkeypatch.setattr(product_check, "SECONDS", 1e-9)
    return name


def test_report_of_a_gpu_that_computes_right(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One text with machine, driver, versions, warnings and each check."""
    assert selftest.selftest({}, as_json=False) == 0
    report = capsys.readouterr().out
    lines = report.splitlines()
    assert lines[0].startswith(f"{backend} on GPU 9 (bfloat16), localllm ")
    assert f"  torch version: {torch.__version__}" in lines
    assert {"  driver: 7.1", "  read bandwidth: 500 GB/s", "  warning: a kernel is slower"} <= set(lines)
    assert "  ok      known answers, one by one: 3 answers" in lines
    assert all(title in report for title in GPU[backend])
    assert "of the bandwidth" in report
    assert lines[-1] == "all checks passed"


def test_report_of_a_gpu_that_computes_wrong(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.new_zeros(len(x), len(weight))

    ops = OPS[backend]
    monkeypatch.setitem(OPS, backend, replace(ops, linear=replace(ops.linear, dense=wrong)))
    assert selftest.selftest({}, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    failures = [line for line in lines if "FAILED" in line]
    assert failures
    assert all("linear.dense" in line for line in failures)
    assert lines[-1] == "some checks failed: please report this output"
