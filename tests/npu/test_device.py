"""The options that an NPU refuses."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.backends.npu.device import device
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
