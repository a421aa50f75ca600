"""The checks of `localllm selftest` that ops alone do not have: they pass on the CPU, and find defects."""

from __future__ import annotations

import pytest
import torch

from localllm.backends.hip import check
from localllm.backends.pytorch.device import Captured
from localllm.kernels.ops import Ops
from localllm.kernels.ops.streams import InOrder

from ..tape import Tape

pytestmark = pytest.mark.real_otherdevice


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CudaRecorder", Tape)
    monkeypatch.setattr(check, "SideStream", lambda module: InOrder())
    monkeypatch.setattr("localllm.backends.pytorch.gpu.graph_check.ROUNDS", 3)


def defects() -> dict[str, str]:
    return {result.title: result.defect for result in check.checks(Ops(), "cpu", torch.bfloat16)}


def test_checks_pass() -> None:
    assert defects() == {
        "graph of attention.paged with other contexts": "",
        "graph of attention.latent with other contexts": "",
        "order of two streams": "",
    }


class Stale(Tape):
    """Replays nothing."""

    def end(self) -> Captured:
        super().end()
        return lambda contexts: None


def test_graphs_that_compute_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CudaRecorder", Stale)
    assert all(defects().values())


def test_capture_that_fails_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Tape:
        raise RuntimeError("no graphs\nmore")

    monkeypatch.setattr(check, "CudaRecorder", refuse)
    assert set(defects().values()) == {"fails: RuntimeError: no graphs"}
