"""The record of an NPU, and the options that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.backends.npu.defaults import MAX_GRAPHS, PAGE_SIZE
from localllm.backends.npu.device import _versions, device
from localllm.backends.pytorch.gpu.memory import GpuMemory
from localllm.engine.errors import SettingRefused
from localllm.engine.options import LoadOptions

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            {"graphs": "split"},
            "Inductor does not compile for NPUs",
            "set graphs to breakable, or LOCALLLM_DEV_COMPILER",
        ),
        ({"graphs": "split", "compiler": "eager", "prefetch": "on"}, "not supported with prefetch", "graphs to full"),
        ({"graphs": "breakable", "prefetch": "on"}, "not supported with prefetch", "LOCALLLM_DEV_PREFETCH to off"),
    ],
)
def test_graphs_that_cannot_be_captured_are_refused(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(SettingRefused, match=message) as refusal:
        device(LoadOptions(**options))
    assert refusal.value.setting == "graphs"
    assert hint in refusal.value.hint


@pytest.mark.parametrize("options", [{"graphs": "split", "compiler": "eager"}, {"graphs": "full", "prefetch": "on"}])
def test_other_graphs_are_accepted(options: dict[str, Any]) -> None:
    assert device(LoadOptions(**options)).graphs == "full"


@pytest.mark.parametrize(("gib", "step_tokens", "captured_rows"), [(32, 4096, 16), (64, 8192, 64), (128, 8192, None)])
def test_record_has_the_defaults_of_its_memory(
    gib: int, step_tokens: int, captured_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuMemory, "total", lambda self: gib * 2**30)
    npu = device()
    assert (npu.step_tokens, npu.captured_rows) == (step_tokens, captured_rows)
    assert (npu.max_graphs, npu.page_size) == (MAX_GRAPHS, PAGE_SIZE)


def test_verdicts_of_the_self_test_depend_on_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(_versions())
    monkeypatch.setattr("torch_npu.npu.utils.get_cann_version", lambda: "another")
    assert list(_versions()) != before
