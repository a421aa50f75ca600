"""Each call of torch.xpu in the backend, and in the code of all torch devices that it uses, fits the torch here."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from localllm.backends import xpu

from ..signatures import INDIRECT, Call, check, direct_calls

DIRECT = direct_calls(torch.xpu, *Path(xpu.__file__).parent.glob("*.py"))
GRAPH: tuple[Call, ...] = (
    ("XPUGraph.capture_begin", 1, ("pool",)),
    ("XPUGraph.capture_end", 1, ()),
    ("XPUGraph.replay", 1, ()),
)


def test_the_sources_are_read() -> None:
    assert {name for name, *_ in DIRECT} >= {"XPUGraph", "mem_get_info", "memory_reserved", "empty_cache"}


@pytest.mark.contract
@pytest.mark.parametrize("call", [*DIRECT, *INDIRECT, *GRAPH], ids=lambda call: call[0])
def test_call(call: Call) -> None:
    check(torch.xpu, call)


@pytest.mark.contract
def test_xpu_graphs_have_no_error_mode() -> None:
    """If torch adds one, the recorder should name the mode of CUDA graphs."""
    assert "capture_error_mode" not in inspect.signature(torch.xpu.XPUGraph.capture_begin).parameters
    assert list(inspect.signature(torch.xpu.graph).parameters) == ["xpu_graph", "pool", "stream"]
